"""Measuring: plain and speculative decoding in turns."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.bench.report import MIN_TRIALS, Alpha, Measured, Report, Summary
    from paceline.tools.bench.runner import (
        EngineContender,
        MeasuredSystem,
        ProfiledContender,
        Workload,
        compare,
        connect,
    )

__all__ = [
    "MIN_TRIALS",
    "Alpha",
    "EngineContender",
    "Measured",
    "MeasuredSystem",
    "ProfiledContender",
    "Report",
    "Summary",
    "Workload",
    "compare",
    "connect",
]

__getattr__ = lazy_face(
    __name__,
    {
        "report": "Alpha MIN_TRIALS Measured Report Summary",
        "runner": "EngineContender MeasuredSystem ProfiledContender Workload compare connect",
    },
)
