"""Draft heads and distilled drafts: models, folders, loading."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.trained import DistilledModel, MedusaModel, distilled_config
    from paceline.models.heads.vocabulary import (
        Bits,
        DraftVocabulary,
        embedding_for,
        inner_width,
        prepare_draft,
        proposable_ids,
    )

__all__ = [
    "Bits",
    "DistilledModel",
    "DraftVocabulary",
    "MedusaModel",
    "distilled_config",
    "embedding_for",
    "inner_width",
    "prepare_draft",
    "proposable_ids",
]

__getattr__ = lazy_face(
    __name__,
    {
        "trained": "DistilledModel MedusaModel distilled_config",
        "vocabulary": "Bits DraftVocabulary embedding_for inner_width prepare_draft proposable_ids",
    },
)
