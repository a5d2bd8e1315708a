"""Progress of a long run, and how a run is stopped."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.progress.progress import (
        INTERRUPTED,
        PlainProgress,
        Stopped,
        StopRequest,
        TrainingLog,
        stop_on_interrupt,
    )

__all__ = ["INTERRUPTED", "PlainProgress", "StopRequest", "Stopped", "TrainingLog", "stop_on_interrupt"]

__getattr__ = lazy_face(
    __name__, {"progress": "INTERRUPTED PlainProgress StopRequest Stopped TrainingLog stop_on_interrupt"}
)
