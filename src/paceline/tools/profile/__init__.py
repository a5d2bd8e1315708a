"""The time of each part of a step, measured step by step."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.tools.profile.measurement import LABELS, PARTS, MeasurementProgress, Profile, RoundTimes, profile
    from paceline.tools.profile.passes import DEPTH
    from paceline.tools.profile.recorder import RecordedRound, Recorder
    from paceline.tools.profile.worker_profile import Prices, measure_profile

__all__ = [
    "DEPTH",
    "LABELS",
    "PARTS",
    "MeasurementProgress",
    "Prices",
    "Profile",
    "RecordedRound",
    "Recorder",
    "RoundTimes",
    "measure_profile",
    "profile",
]

__getattr__ = lazy_face(
    __name__,
    {
        "measurement": "LABELS MeasurementProgress PARTS Profile RoundTimes profile",
        "passes": "DEPTH",
        "recorder": "RecordedRound Recorder",
        "worker_profile": "Prices measure_profile",
    },
)
