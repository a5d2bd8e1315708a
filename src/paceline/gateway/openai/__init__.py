"""The OpenAI-compatible API."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.openai.error_handlers import install_error_handlers
    from paceline.gateway.openai.routes import generation_routes, model_routes

__all__ = ["generation_routes", "install_error_handlers", "model_routes"]

__getattr__ = lazy_face(
    __name__, {"error_handlers": "install_error_handlers", "routes": "generation_routes model_routes"}
)
