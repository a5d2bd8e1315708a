"""Draft heads and distilled drafts: models, folders, loading."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.medusa import MedusaConfig, MedusaModel, read_medusa
    from paceline.models.heads.trained import DistilledModel, distilled_config
    from paceline.models.heads.vocabulary import (
        Bits,
        DraftVocabulary,
        draft_ids,
        embedding_for,
        inner_width,
        prepare_draft,
        proposable_ids,
    )

__all__ = [
    "Bits",
    "DistilledModel",
    "DraftVocabulary",
    "MedusaConfig",
    "MedusaModel",
    "distilled_config",
    "draft_ids",
    "embedding_for",
    "inner_width",
    "prepare_draft",
    "proposable_ids",
    "read_medusa",
]

__getattr__ = lazy_face(
    __name__,
    {
        "medusa": "MedusaConfig MedusaModel read_medusa",
        "trained": "DistilledModel distilled_config",
        "vocabulary": "Bits DraftVocabulary draft_ids embedding_for inner_width prepare_draft proposable_ids",
    },
)
