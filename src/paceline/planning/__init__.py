"""Worker profiles, request traces, the simulator of a cluster, and the planner that sizes its pools."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.planning.observation import ROLES, Controller, Observation, PoolState, Sizes
    from paceline.planning.profile import ProfileCurve, ProfileValue, WorkerProfile, load_profile, save_profile

__all__ = [
    "ROLES",
    "Controller",
    "Observation",
    "PoolState",
    "ProfileCurve",
    "ProfileValue",
    "Sizes",
    "WorkerProfile",
    "load_profile",
    "save_profile",
]

__getattr__ = lazy_face(
    __name__,
    {
        "observation": "Controller Observation PoolState ROLES Sizes",
        "profile": "ProfileCurve ProfileValue WorkerProfile load_profile save_profile",
    },
)
