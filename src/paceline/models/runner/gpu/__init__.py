"""Runners on a GPU: fused decoding, ragged prefill, memory."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.runner.gpu.mixed import MixedPasses
    from paceline.models.runner.gpu.passes import PassKind
    from paceline.models.runner.gpu.ragged import MAX_RAGGED_ROWS
    from paceline.models.runner.gpu.runner import GpuRunner, PassLimits, padded_sizes
    from paceline.models.runner.gpu.workspace import Workspace

__all__ = ["MAX_RAGGED_ROWS", "GpuRunner", "MixedPasses", "PassKind", "PassLimits", "Workspace", "padded_sizes"]

__getattr__ = lazy_face(
    __name__,
    {
        "mixed": "MixedPasses",
        "passes": "PassKind",
        "ragged": "MAX_RAGGED_ROWS",
        "runner": "GpuRunner PassLimits padded_sizes",
        "workspace": "Workspace",
    },
)
