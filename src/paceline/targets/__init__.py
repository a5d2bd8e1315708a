"""The client of target workers: routing, health, streams, failover."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.targets.client import TargetClient
    from paceline.targets.connection import TargetConnection
    from paceline.targets.pool import TargetPool
    from paceline.targets.targets import CATEGORY, PROMPT, SAMPLINGS

__all__ = ["CATEGORY", "PROMPT", "SAMPLINGS", "TargetClient", "TargetConnection", "TargetPool"]

__getattr__ = lazy_face(
    __name__,
    {
        "client": "TargetClient",
        "connection": "TargetConnection",
        "pool": "TargetPool",
        "targets": "CATEGORY PROMPT SAMPLINGS",
    },
)
