"""The gateway: OpenAI-compatible HTTP, metrics, run-time flags."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.client import ServerClient, ServerUnavailable

__all__ = ["ServerClient", "ServerUnavailable"]

__getattr__ = lazy_face(__name__, {"client": "ServerClient ServerUnavailable"})
