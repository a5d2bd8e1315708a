"""Workers as Ray actors: named and detached, and the actor that starts and drains them."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.deploy.ray.deployment import RayDeployment

__all__ = ["RayDeployment"]

__getattr__ = lazy_face(__name__, {"deployment": "RayDeployment"})
