"""Trees grown with a draft model: every path that is computed has a lane, a fork of the sequence's cache."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from torch import Tensor

from paceline.speculation.drafts import DraftTree
from paceline.speculation.proposers.model.model_drafter import Chunk, DraftSequence, ModelDrafter
from paceline.speculation.trees import Growth, rank
from paceline.speculation.verification import MAX_NODES

BRANCHES = 8
"""Children of a node."""
WIDTH = 8
"""Nodes of a level that get children."""
LEVELS = 10
"""Maximal length of a path."""

Q = TypeVar("Q")


@dataclass(frozen=True, slots=True, eq=False)
class TreeRequest:
    """A tree to grow: its sequence, whose cache lacks at most two tokens, and its limits."""

    sequence: DraftSequence
    num_nodes: int
    max_levels: int


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """A path to compute: the tokens of `sequence` end with `node`, which gets children."""

    root: DraftSequence
    tree: Growth
    node: int
    sequence: DraftSequence


class ModelTrees(Generic[Q]):
    """Grows trees best first, level by level. One pass computes a level of all trees.

    The best child of a node continues the lane of its parent, its other children fork it. Lanes are kept until `commit`, so
    that the cache of an accepted path is computed once, whichever path it is.
    """

    def __init__(self, drafter: ModelDrafter[Q], branches: int = BRANCHES) -> None:
        """`branches` is the most children of a node."""
        self._drafter, self._branches = drafter, branches
        self._lanes: defaultdict[int, list[DraftSequence]] = defaultdict(list)
        """Forks by sequence."""
        self._ids = count(-1, -1)  # those of sequences are not negative

    def draft(self, requests: Sequence[TreeRequest]) -> list[DraftTree]:
        """The tree of each request; a full cache makes it smaller."""
        trees = [Growth(min(request.num_nodes, MAX_NODES), request.max_levels) for request in requests]
        lanes = [
            _Lane(request.sequence, tree, -1, request.sequence) for request, tree in zip(requests, trees, strict=True)
        ]
        width = max(1, min(WIDTH, self._drafter.max_rows // len(trees)))
        for level in range(1, LEVELS + 1):
            logits = self._drafter.forward([Chunk(lane.sequence, lane.sequence.num_missing) for lane in lanes])
            assert logits is not None
            self._add_children(logits, lanes)
            lanes = [] if level == LEVELS else self._next_lanes(lanes, level, width)
            if not lanes:
                break
        return [tree.draft() for tree in trees]

    def commit(self, sequence: DraftSequence, ids: Sequence[int]) -> None:
        """The tokens `ids` of the sequence are committed: it continues the lane that has most of them in its cache."""
        lanes = self._lanes.pop(sequence.id, [])
        best = max(lanes, key=lambda lane: _num_matched(lane, ids), default=sequence)
        if _num_matched(best, ids) > _num_matched(sequence, ids):
            self._drafter.tables.replace(sequence.id, best.id)
            sequence.ids, sequence.num_cached = best.ids, best.num_cached
            lanes.remove(best)
        self._drafter.close(lanes)

    def close(self, sequence_ids: Iterable[int]) -> None:
        """Free the lanes of these sequences."""
        for sequence_id in sequence_ids:
            self._drafter.close(self._lanes.pop(sequence_id, []))

    def close_all(self) -> None:
        """Free the lanes of all sequences that were not committed since their draft."""
        self.close(list(self._lanes))

    def _add_children(self, logits: Tensor, lanes: Sequence[_Lane]) -> None:
        rows = [lane.sequence.row() for lane in lanes]
        coupled = [lane.sequence.params.rule == "coupled" for lane in lanes]
        most = min(self._branches, max(lane.tree.budget for lane in lanes))
        for lane, children in zip(lanes, rank(logits, rows, coupled, None, most), strict=True):
            lane.tree.add(lane.node, children)

    def _next_lanes(self, lanes: Sequence[_Lane], level: int, width: int) -> list[_Lane]:
        """Lanes of the nodes of `level` that get children. Without a free block a node gets none."""
        frontiers = {tree: tree.frontier(level, width) for tree in dict.fromkeys([lane.tree for lane in lanes])}
        found = []
        for lane in lanes:
            children = [node for node in frontiers[lane.tree] if lane.tree.parents[node] == lane.node]
            for node in children[1:]:
                fork = self._fork(lane, lane.tree.tokens[node])
                if fork is not None:
                    found.append(_Lane(lane.root, lane.tree, node, fork))
            if children:
                lane.sequence.ids.append(lane.tree.tokens[children[0]])
                if self._drafter.reserve(lane.sequence, len(lane.sequence.ids)):
                    found.append(_Lane(lane.root, lane.tree, children[0], lane.sequence))
                else:
                    lane.sequence.ids.pop()
        return found

    def _fork(self, lane: _Lane, token: int) -> DraftSequence | None:
        """A lane that continues `lane` with `token`; None without a free block."""
        parent = lane.sequence
        child = DraftSequence(next(self._ids), parent.params, [*parent.ids, token], parent.num_committed)
        child.is_shared = parent.is_shared
        self._drafter.fork(parent, child)
        if not self._drafter.is_open(child):
            return None
        self._lanes[lane.root.id].append(child)
        return child if self._drafter.reserve(child, len(child.ids)) else None


def _num_matched(lane: DraftSequence, ids: Sequence[int]) -> int:
    """Tokens of `ids` in the cache of the lane, which has all that were committed before."""
    matched, end = lane.num_committed, min(lane.num_cached, len(ids))
    while matched < end and lane.ids[matched] == ids[matched]:
        matched += 1
    return matched
