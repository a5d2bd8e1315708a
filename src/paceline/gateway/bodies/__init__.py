"""Checks of request bodies, in a process of their own if they are large, and fair shares of what bodies need."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.bodies.check import BodyLimits, check_characters, check_shape, max_values
    from paceline.gateway.bodies.errors import body_error, translated
    from paceline.gateway.bodies.fair_share import CpuBudgets, FairShare, FairThreads, Owner, owner_of
    from paceline.gateway.bodies.process import BodyProcess

__all__ = [
    "BodyLimits",
    "BodyProcess",
    "CpuBudgets",
    "FairShare",
    "FairThreads",
    "Owner",
    "body_error",
    "check_characters",
    "check_shape",
    "max_values",
    "owner_of",
    "translated",
]

__getattr__ = lazy_face(
    __name__,
    {
        "check": "BodyLimits check_characters check_shape max_values",
        "errors": "body_error translated",
        "fair_share": "CpuBudgets FairShare FairThreads Owner owner_of",
        "process": "BodyProcess",
    },
)
