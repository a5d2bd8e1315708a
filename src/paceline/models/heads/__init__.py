"""Draft heads and distilled drafts: models, folders, loading."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.models.heads.medusa import MedusaConfig, MedusaModel, read_medusa
    from paceline.models.heads.published import read_layers, table_shapes
    from paceline.models.heads.trained import DistilledModel, distilled_config
    from paceline.models.heads.vocabulary import (
        DraftVocabulary,
        HeadLoader,
        draft_ids,
        inner_width,
        proposable_ids,
    )

__all__ = [
    "DistilledModel",
    "DraftVocabulary",
    "HeadLoader",
    "MedusaConfig",
    "MedusaModel",
    "distilled_config",
    "draft_ids",
    "inner_width",
    "proposable_ids",
    "read_layers",
    "read_medusa",
    "table_shapes",
]

__getattr__ = lazy_face(
    __name__,
    {
        "medusa": "MedusaConfig MedusaModel read_medusa",
        "published": "read_layers table_shapes",
        "trained": "DistilledModel distilled_config",
        "vocabulary": "DraftVocabulary HeadLoader draft_ids inner_width proposable_ids",
    },
)
