"""The draft protocol: the proposer `pool` of a target worker, and the draft worker that answers it."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.drafting.connection import DraftAddress
    from paceline.drafting.control import PoolControl
    from paceline.drafting.model import ModelDraftBackend, load_draft_model
    from paceline.drafting.proposer import PoolProposer
    from paceline.drafting.scheduler import DraftLimits
    from paceline.drafting.worker import DraftWorker

__all__ = [
    "DraftAddress",
    "DraftLimits",
    "DraftWorker",
    "ModelDraftBackend",
    "PoolControl",
    "PoolProposer",
    "load_draft_model",
]

__getattr__ = lazy_face(
    __name__,
    {
        "connection": "DraftAddress",
        "control": "PoolControl",
        "model": "ModelDraftBackend load_draft_model",
        "proposer": "PoolProposer",
        "scheduler": "DraftLimits",
        "worker": "DraftWorker",
    },
)
