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
        Repository,
        find_checkpoint,
        find_model,
        gguf_parts,
        known_models,
        pick_draft,
        short_name,
    )

__all__ = [
    "EMBEDDED",
    "PREFIX",
    "SHAPES",
    "InflatedShape",
    "Inflation",
    "Repository",
    "find_checkpoint",
    "find_model",
    "gguf_parts",
    "known_models",
    "pick_draft",
    "short_name",
]

__getattr__ = lazy_face(
    __name__,
    {
        "hub": "EMBEDDED InflatedShape Inflation PREFIX Repository SHAPES find_checkpoint find_model gguf_parts known_models "
        "pick_draft short_name",
    },
)
