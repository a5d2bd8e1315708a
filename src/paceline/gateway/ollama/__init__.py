"""Ollama's API."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.gateway.ollama.routes import ollama_routes

__all__ = ["ollama_routes"]

__getattr__ = lazy_face(__name__, {"routes": "ollama_routes"})
