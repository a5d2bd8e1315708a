"""The formats of weights: safetensors folders, GGUF files, quantised weights."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.weights.checkpoint import Checkpoint, QuantizedWeights, Weights
    from paceline.models.weights.gguf import open_gguf
    from paceline.models.weights.safetensors import FolderWeights, open_folder
    from paceline.models.weights.shapes import check_weights, checkpoint_weights

__all__ = [
    "Checkpoint",
    "FolderWeights",
    "QuantizedWeights",
    "Weights",
    "check_weights",
    "checkpoint_weights",
    "open_folder",
    "open_gguf",
]

__getattr__ = lazy_face(
    __name__,
    {
        "checkpoint": "Checkpoint QuantizedWeights Weights",
        "gguf": "open_gguf",
        "safetensors": "FolderWeights open_folder",
        "shapes": "check_weights checkpoint_weights",
    },
)
