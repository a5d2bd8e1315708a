"""The decoder: its layers, its forward pass, and how its weights are loaded."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.decoder.decoder import (
        AfterLayer,
        ForwardOutput,
        HiddenStates,
        Layer,
        Loader,
        has_exact_norms,
        layer_matrices,
        layer_vectors,
    )
    from paceline.models.decoder.forward import DecoderModel
    from paceline.models.decoder.forward_gpu import gpu_forward, head_logits, plan_pass

__all__ = [
    "AfterLayer",
    "DecoderModel",
    "ForwardOutput",
    "HiddenStates",
    "Layer",
    "Loader",
    "gpu_forward",
    "has_exact_norms",
    "head_logits",
    "layer_matrices",
    "layer_vectors",
    "plan_pass",
]

__getattr__ = lazy_face(
    __name__,
    {
        "decoder": "AfterLayer ForwardOutput HiddenStates Layer Loader has_exact_norms layer_matrices layer_vectors",
        "forward": "DecoderModel",
        "forward_gpu": "gpu_forward head_logits plan_pass",
    },
)
