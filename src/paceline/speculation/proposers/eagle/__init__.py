"""The proposer of EAGLE heads."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.proposers.eagle.eagle import EagleProposer, GraphStart
    from paceline.speculation.proposers.eagle.eagle_cache import PENDING_ROWS, SEQUENCE_ROWS, EagleCache, EagleSequence
    from paceline.speculation.proposers.eagle.eagle_trees import WIDTH

__all__ = ["PENDING_ROWS", "SEQUENCE_ROWS", "WIDTH", "EagleCache", "EagleProposer", "EagleSequence", "GraphStart"]

__getattr__ = lazy_face(
    __name__,
    {
        "eagle": "EagleProposer GraphStart",
        "eagle_cache": "EagleCache EagleSequence PENDING_ROWS SEQUENCE_ROWS",
        "eagle_trees": "WIDTH",
    },
)
