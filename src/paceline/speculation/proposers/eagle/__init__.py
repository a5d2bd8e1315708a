"""The proposer of EAGLE heads."""

from typing import TYPE_CHECKING

from paceline.core.lazy_face import lazy_face

if TYPE_CHECKING:
    from paceline.speculation.proposers.eagle.eagle import EagleProposer, GraphStart
    from paceline.speculation.proposers.eagle.eagle_cache import PENDING_ROWS, SEQUENCE_ROWS
    from paceline.speculation.proposers.eagle.eagle_trees import WIDTH

__all__ = ["PENDING_ROWS", "SEQUENCE_ROWS", "WIDTH", "EagleProposer", "GraphStart"]

__getattr__ = lazy_face(
    __name__, {"eagle": "EagleProposer GraphStart", "eagle_cache": "PENDING_ROWS SEQUENCE_ROWS", "eagle_trees": "WIDTH"}
)
