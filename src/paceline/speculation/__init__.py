"""Drafting and verification: the interface of proposers, drafts, acceptance rules."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.draft_weights import DraftWeights
    from paceline.speculation.proposer import HiddenRequest, HiddenRows, Proposer, ProposerTraits, SequenceProgress

__all__ = ["DraftWeights", "HiddenRequest", "HiddenRows", "Proposer", "ProposerTraits", "SequenceProgress"]

__getattr__ = lazy_face(
    __name__,
    {"draft_weights": "DraftWeights", "proposer": "HiddenRequest HiddenRows Proposer ProposerTraits SequenceProgress"},
)
