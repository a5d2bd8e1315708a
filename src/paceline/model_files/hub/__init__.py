"""Where a model's files are found, and shapes of inflated models."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.model_files.hub.hub import (
        EMBEDDED,
        PREFIX,
        SHAPES,
        InflatedShape,
        Inflation,
        find_checkpoint,
        find_model,
        gguf_parts,
        pick_draft,
    )

__all__ = [
    "EMBEDDED",
    "PREFIX",
    "SHAPES",
    "InflatedShape",
    "Inflation",
    "find_checkpoint",
    "find_model",
    "gguf_parts",
    "pick_draft",
]

__getattr__ = lazy_face(
    __name__,
    {"hub": "EMBEDDED InflatedShape Inflation PREFIX SHAPES find_checkpoint find_model gguf_parts pick_draft"},
)
