"""The proposers that draft with a model: a draft model, or the target's own first layers."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.proposers.model.draft_model import DraftModelProposer
    from paceline.speculation.proposers.model.layer_skip import LayerSkipProposer, exits
    from paceline.speculation.proposers.model.model_drafter import Chunk, DraftSequence, ModelDrafter, SequenceParams
    from paceline.speculation.proposers.model.model_trees import BRANCHES

__all__ = [
    "BRANCHES",
    "Chunk",
    "DraftModelProposer",
    "DraftSequence",
    "LayerSkipProposer",
    "ModelDrafter",
    "SequenceParams",
    "exits",
]

__getattr__ = lazy_face(
    __name__,
    {
        "draft_model": "DraftModelProposer",
        "layer_skip": "LayerSkipProposer exits",
        "model_drafter": "Chunk DraftSequence ModelDrafter SequenceParams",
        "model_trees": "BRANCHES",
    },
)
