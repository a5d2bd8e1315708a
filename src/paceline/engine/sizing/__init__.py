"""The limits of an engine, the memory of its parts, and the cost of its passes."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.engine.sizing.calibration import MIN_GAIN, calibrate, measure_context, measure_gain, median_seconds
    from paceline.engine.sizing.sizing import MemoryFit, ResolvedLimits, Sizing, device_facts, num_lanes, size_engine

__all__ = [
    "MIN_GAIN",
    "MemoryFit",
    "ResolvedLimits",
    "Sizing",
    "calibrate",
    "device_facts",
    "measure_context",
    "measure_gain",
    "median_seconds",
    "num_lanes",
    "size_engine",
]

__getattr__ = lazy_face(
    __name__,
    {
        "calibration": "MIN_GAIN calibrate measure_context measure_gain median_seconds",
        "sizing": "MemoryFit ResolvedLimits Sizing device_facts num_lanes size_engine",
    },
)
