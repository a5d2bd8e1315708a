"""Loading of a model: from files, streamed, or inflated."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.loading.inflated import inflate
    from paceline.models.loading.load import (
        LoadedModel,
        build_model,
        check_memory,
        load_model,
        open_checkpoint,
        weight_bytes,
    )
    from paceline.models.loading.streamed import StreamedModel, StreamedWeights

__all__ = [
    "LoadedModel",
    "StreamedModel",
    "StreamedWeights",
    "build_model",
    "check_memory",
    "inflate",
    "load_model",
    "open_checkpoint",
    "weight_bytes",
]

__getattr__ = lazy_face(
    __name__,
    {
        "inflated": "inflate",
        "load": "LoadedModel build_model check_memory load_model open_checkpoint weight_bytes",
        "streamed": "StreamedModel StreamedWeights",
    },
)
