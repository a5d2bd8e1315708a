"""Checks of request bodies, in a process of their own if they are large."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.bodies.check import BodyLimits, check_characters, check_shape, max_values
    from paceline.gateway.bodies.errors import body_error
    from paceline.gateway.bodies.process import BodyProcess

__all__ = ["BodyLimits", "BodyProcess", "body_error", "check_characters", "check_shape", "max_values"]

__getattr__ = lazy_face(
    __name__,
    {"check": "BodyLimits check_characters check_shape max_values", "errors": "body_error", "process": "BodyProcess"},
)
