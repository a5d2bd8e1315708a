"""Trees that an EAGLE head grows level by level along the most probable paths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from paceline.kernels.eagle_head import MAX_TREE_SLOTS, TreeRoot
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.models.drafts.eagle import MAX_BRANCH, EagleRunner
from paceline.models.runner import Span
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.trees.beams import Beams, CachedSequence, choose
from paceline.speculation.trees.growth import Growth
from paceline.speculation.trees.ranking import RankRules, draft_row, rank, tree_root
from paceline.speculation.trees.tree import MAX_NODES

BRANCHES = 8
"""Children of a node."""
WIDTH = 8
"""Nodes of a level that get children."""
LEVELS = 10
"""Maximal length of a path."""
DEVICE_LEVELS = 7
"""Maximal length of a path that grows on a GPU: all levels are computed there, and few paths get longer."""
assert LEVELS <= MAX_BRANCH


@dataclass(frozen=True, slots=True)
class TreeStart:
    """A sequence whose tree is to grow, and its place in the head's cache."""

    progress: SequenceProgress
    blocks: Sequence[int]
    num_cached: int

    @property
    def budget(self) -> int:
        return min(self.progress.depth, MAX_NODES)

    @property
    def last_position(self) -> int:
        """Position of its last cached slot."""
        return len(self.progress.ids) - 2


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node about to get children."""

    sequence: int
    node: int
    parent_row: int
    """Row of its parent's state in the pass before."""


class EagleTrees:
    """Three ways to grow the same trees: the host chooses the nodes of every level, the device computes all levels before the
    host reads any, or a native function does everything (`roots`)."""

    def __init__(self, runner: EagleRunner) -> None:
        self._runner, self._model = runner, runner.model

    def grow(self, starts: Sequence[TreeStart], states: Tensor) -> list[Growth]:
        """Grow level by level; the host chooses the nodes that get children. `states` [len(starts), D]: of the last slots."""
        trees = [Growth(start.budget, start.progress.max_levels) for start in starts]
        before = [_Branch(i, -1, i) for i in range(len(starts))]
        self._add_children(states, before, starts, trees)
        width = min(WIDTH, self._runner.num_lanes // len(starts))
        for level in range(1, LEVELS):
            row_of = {(branch.sequence, branch.node): row for row, branch in enumerate(before)}
            branches = [
                _Branch(i, node, row_of[i, tree.parents[node]])
                for i, tree in enumerate(trees)
                for node in tree.frontier(level, width)
            ]
            if not branches:
                break
            states = self._advance(states, branches, starts, trees, level)
            self._add_children(states, branches, starts, trees)
            before = branches
        return trees

    def grow_on_device(self, starts: Sequence[TreeStart], states: Tensor) -> list[Growth]:
        """Grows the same trees up to `DEVICE_LEVELS`. The host reads them once."""
        budgets = [start.budget for start in starts]
        most = max(budgets)
        branches = min(BRANCHES, most, self._model.vocabulary.head.shape[0])
        width = max(1, min(WIDTH, branches, most - 1, self._runner.num_lanes // len(starts)))
        cached = [CachedSequence(start.blocks, start.num_cached, start.last_position) for start in starts]
        max_levels = [start.progress.max_levels for start in starts]
        deepest = min(most, max(DEVICE_LEVELS if count is None else min(count, DEVICE_LEVELS) for count in max_levels))
        rules = [self._rules(starts, level, width if level else 1, states) for level in range(deepest)]
        return choose(Beams(self._runner, cached, width, branches).grow(states, rules), budgets, max_levels)

    def roots(self, starts: Sequence[TreeStart]) -> tuple[list[TreeRoot], int, int]:
        """Roots, width and branches of native trees, which are those of `grow`."""
        width = min(WIDTH, self._runner.num_lanes // len(starts))
        roots = []
        for number, start in enumerate(starts):
            blocks = start.blocks[: blocks_for(start.num_cached)]
            own = self._runner.lanes(number * width, width)[: blocks_for(MAX_TREE_SLOTS)]
            roots.append(tree_root(start.progress, [*blocks, *own], start.num_cached, LEVELS))
        return roots, width, min(BRANCHES, max(root.budget for root in roots))

    def _rules(self, starts: Sequence[TreeStart], level: int, width: int, states: Tensor) -> RankRules:
        rows = [
            replace(row, position=row.position + level) for row in (draft_row(start.progress, ()) for start in starts)
        ]
        coupled = [start.progress.verification == "coupled" for start in starts for _ in range(width)]
        like = states.new_empty(()).expand(len(coupled), self._model.vocabulary.head.shape[0])
        return RankRules.of([row for row in rows for _ in range(width)], coupled, self._model.vocabulary.ids, like)

    def _add_children(
        self, states: Tensor, branches: Sequence[_Branch], starts: Sequence[TreeStart], trees: Sequence[Growth]
    ) -> None:
        """Add the most probable children to the node of every branch."""
        logits = self._model.logits(states)
        rows = [draft_row(starts[b.sequence].progress, trees[b.sequence].path(b.node)) for b in branches]
        coupled = [starts[b.sequence].progress.verification == "coupled" for b in branches]
        most = min(BRANCHES, max(tree.budget for tree in trees))
        for branch, children in zip(branches, rank(logits, rows, coupled, self._model.vocabulary, most), strict=True):
            trees[branch.sequence].add(branch.node, children)

    def _advance(
        self,
        states: Tensor,
        branches: Sequence[_Branch],
        starts: Sequence[TreeStart],
        trees: Sequence[Growth],
        level: int,
    ) -> Tensor:
        """Compute one slot for each branch, in its own lane: [len(branches), D]."""
        sources: list[int] = []
        targets: list[int] = []
        spans = []
        for number, branch in enumerate(branches):
            start = starts[branch.sequence]
            full, lane = start.num_cached // BLOCK_SIZE, self._runner.lane(number)
            behind = start.blocks[full:] if level == 1 else self._runner.lane(branch.parent_row)
            used = blocks_for(start.num_cached - full * BLOCK_SIZE + level - 1)
            sources.extend(behind[:used])
            targets.extend(lane[:used])
            spans.append(
                Span(
                    blocks=[*start.blocks[:full], *lane],
                    context_len=start.num_cached + level - 1,
                    tokens=[trees[branch.sequence].tokens[branch.node]],
                    num_logits=0,
                    positions=[start.last_position + level],
                )
            )
        self._runner.copy(sources, targets)
        return self._runner.forward(spans, states[[branch.parent_row for branch in branches]])
