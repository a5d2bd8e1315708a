"""Anthropic's Messages API."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.messages.routes import messages_routes

__all__ = ["messages_routes"]

__getattr__ = lazy_face(__name__, {"routes": "messages_routes"})
