"""The decoder: its layers, its forward pass, and how its weights are loaded."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.decoder.decoder import ForwardOutput, HiddenStates, Layer, Loader
    from paceline.models.decoder.forward import DecoderModel
    from paceline.models.decoder.gpu_ops import FusedGpuOps, gpu_forward, head_logits, plan_pass
    from paceline.models.decoder.ops import TorchOps, native_layer
    from paceline.models.decoder.passes import forward_layer

__all__ = [
    "DecoderModel",
    "ForwardOutput",
    "FusedGpuOps",
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
        "decoder": "ForwardOutput HiddenStates Layer Loader",
        "forward": "DecoderModel",
        "gpu_ops": "FusedGpuOps gpu_forward head_logits plan_pass",
        "ops": "TorchOps native_layer",
        "passes": "forward_layer",
    },
)
