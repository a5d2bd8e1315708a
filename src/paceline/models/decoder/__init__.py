"""The decoder: its layers, its forward pass, and how its weights are loaded."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.decoder.cpu_ops import native_layer
    from paceline.models.decoder.decoder import AfterLayer, ForwardOutput, HiddenStates, Layer, Loader
    from paceline.models.decoder.forward import DecoderModel, forward_layer
    from paceline.models.decoder.forward_gpu import gpu_forward, head_logits, plan_pass
    from paceline.models.decoder.ops import TorchOps

__all__ = [
    "AfterLayer",
    "DecoderModel",
    "ForwardOutput",
    "HiddenStates",
    "Layer",
    "Loader",
    "TorchOps",
    "forward_layer",
    "gpu_forward",
    "head_logits",
    "native_layer",
    "plan_pass",
]

__getattr__ = lazy_face(
    __name__,
    {
        "cpu_ops": "native_layer",
        "decoder": "AfterLayer ForwardOutput HiddenStates Layer Loader",
        "forward": "DecoderModel forward_layer",
        "forward_gpu": "gpu_forward head_logits plan_pass",
        "ops": "TorchOps",
    },
)
