"""The OpenAI-compatible API, and the path of requests that other APIs share."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.openai.error_handlers import install_error_handlers
    from paceline.gateway.openai.parts import AnswerPart, Event, PartsAnswer
    from paceline.gateway.openai.routes import generation_routes, model_routes
    from paceline.gateway.openai.service import ChatStart, ModelService, ModelServices, new_id

__all__ = [
    "AnswerPart",
    "ChatStart",
    "Event",
    "ModelService",
    "ModelServices",
    "PartsAnswer",
    "generation_routes",
    "install_error_handlers",
    "model_routes",
    "new_id",
]

__getattr__ = lazy_face(
    __name__,
    {
        "error_handlers": "install_error_handlers",
        "parts": "Event AnswerPart PartsAnswer",
        "routes": "generation_routes model_routes",
        "service": "ChatStart ModelService ModelServices new_id",
    },
)
