"""The proposers, one file a method."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.proposers.block import BlockProposer
    from paceline.speculation.proposers.combined import CombinedProposer
    from paceline.speculation.proposers.lookahead import LookaheadProposer
    from paceline.speculation.proposers.medusa import MedusaProposer
    from paceline.speculation.proposers.suffix import NgramProposer, SuffixProposer

__all__ = [
    "BlockProposer",
    "CombinedProposer",
    "LookaheadProposer",
    "MedusaProposer",
    "NgramProposer",
    "SuffixProposer",
]

__getattr__ = lazy_face(
    __name__,
    {
        "block": "BlockProposer",
        "combined": "CombinedProposer",
        "lookahead": "LookaheadProposer",
        "medusa": "MedusaProposer",
        "suffix": "NgramProposer SuffixProposer",
    },
)
