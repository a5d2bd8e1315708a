"""Drafts: tokens, trees and batches that proposers make."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.drafts.drafts import (
        NO_COST,
        Draft,
        DraftBatch,
        DraftCost,
        DraftPrefill,
        DraftProbs,
        DraftTree,
        depths,
        merge_batches,
    )

__all__ = [
    "NO_COST",
    "Draft",
    "DraftBatch",
    "DraftCost",
    "DraftPrefill",
    "DraftProbs",
    "DraftTree",
    "depths",
    "merge_batches",
]

__getattr__ = lazy_face(
    __name__, {"drafts": "Draft DraftBatch DraftCost DraftPrefill DraftProbs DraftTree NO_COST depths merge_batches"}
)
