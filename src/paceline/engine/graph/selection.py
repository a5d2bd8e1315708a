"""The drafter of a proposer inside graph steps, and the shapes of its drafts."""

from typing import cast

from paceline.engine.graph.chain_drafter import ChainDrafter
from paceline.engine.graph.drafter import NO_DRAFTS, DraftPrefills, DraftShape, GraphDrafter, GraphProposer
from paceline.engine.graph.slots import DeviceSlots
from paceline.engine.graph.tree_drafter import TreeDrafter, tree_shape
from paceline.speculation.proposers.eagle import EagleProposer
from paceline.speculation.proposers.model import DraftModelProposer


def make_drafter(
    proposer: GraphProposer, slots: DeviceSlots, vocab_size: int, prefills: DraftPrefills | None, max_depth: int
) -> GraphDrafter:
    """The drafter for a proposer; `vocab_size` is the target's."""
    if proposer.traits.is_tree:
        return TreeDrafter(cast(EagleProposer, proposer), slots)
    assert prefills is not None
    return ChainDrafter(cast(DraftModelProposer, proposer), slots, vocab_size, prefills, max_depth)


def draft_shape(proposer: GraphProposer | None, depth: int) -> DraftShape:
    """The shape of graph steps whose deepest draft has `depth` tokens."""
    if proposer is None or not depth:
        return NO_DRAFTS
    return tree_shape(depth) if proposer.traits.is_tree else DraftShape(depth, depth)
