"""OpenAI's Responses API."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.responses.routes import responses_routes

__all__ = ["responses_routes"]

__getattr__ = lazy_face(__name__, {"routes": "responses_routes"})
