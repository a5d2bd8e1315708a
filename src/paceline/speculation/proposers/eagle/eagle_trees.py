"""Trees that an EAGLE head grows level by level along the most probable paths.

`Beams` grows a tree on the device: every level has the same width, and the host reads all levels at the end. On a GPU, waiting
for a level costs more than computing it. Nodes that are not among the best are dropped when the host chooses the draft: the
result is the same as that of growing only the best nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu.eagle_head import MAX_TREE_SLOTS, TreeRoot
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kv import blocks_for
from paceline.models.heads.eagle import LANE_BLOCKS, MAX_BRANCH, EagleRunner
from paceline.models.runner import Span
from paceline.speculation import SequenceProgress
from paceline.speculation.trees import Growth, RankRules, draft_row, rank, tree_root
from paceline.speculation.verification import MAX_NODES


@dataclass(frozen=True, slots=True)
class CachedSequence:
    """A sequence whose committed slots are in the head's cache."""

    blocks: Sequence[int]
    num_cached: int
    position: int
    """Position of its last slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """S trees, W beams, K children of each beam. Level 0 has one beam, the root."""

    tokens: Tensor  # [S, W, K] int64, the target's ids
    confidence: Tensor  # [S, W, K] log
    parents: Tensor  # [S, W] int64: index of each beam among the W * K children of the level before


class Beams:
    """The lanes of a batch. The constructor uploads all that depends on the host."""

    def __init__(self, runner: EagleRunner, sequences: Sequence[CachedSequence], width: int, branches: int) -> None:
        self._runner, self._model = runner, runner.model
        self._count, self._width, self._branches = len(sequences), width, branches
        device = runner.model.device
        lanes = [[runner.lane(s * width + w) for w in range(width)] for s in range(len(sequences))]
        full = [sequence.num_cached // BLOCK_SIZE for sequence in sequences]
        widest = max(full) + LANE_BLOCKS
        tables = [
            [*sequence.blocks[:whole], *lane, *([0] * (widest - whole - LANE_BLOCKS))]
            for sequence, whole, own in zip(sequences, full, lanes, strict=True)
            for lane in own
        ]
        tails = [
            sequence.blocks[whole] if sequence.num_cached % BLOCK_SIZE else own[0][0]
            for sequence, whole, own in zip(sequences, full, lanes, strict=True)
        ]
        self._lanes = torch.tensor(lanes, device=device)  # [S, W, LANE_BLOCKS]
        self._tails = torch.tensor(tails, device=device)  # [S]
        self._tables = torch.tensor(tables, dtype=torch.int32, device=device)  # [S * W, blocks]
        self._starts = torch.arange(len(sequences) * width + 1, dtype=torch.int32, device=device)
        self._plan = runner.model.plan(len(tables), len(tables))
        facts = torch.tensor([[sequence.num_cached, sequence.position] for sequence in sequences], device=device)
        self._contexts, self._positions = facts.repeat_interleave(width, 0).unbind(1)  # [S * W] each

    def grow(self, states: Tensor, rules: Sequence[RankRules]) -> list[Level]:
        """One level for each of `rules`, from the states of the last slots [S, D]. Rules of level 0 have S rows, those of later
        levels S * W."""
        levels = [
            self._children(states, rules[0], torch.zeros(self._count, 1, dtype=torch.int64, device=states.device))
        ]
        values = levels[0].confidence[:, 0]  # [S, K]
        for depth in range(1, len(rules)):
            values, chosen = values.topk(self._width, dim=1)  # [S, W]
            beam = chosen // self._branches  # of the level before
            tokens = levels[-1].tokens.flatten(1).gather(1, chosen)
            self._copy_lanes(depth, beam)
            row = beam + torch.arange(self._count, device=beam.device).unsqueeze(1) * levels[-1].tokens.shape[1]
            states = self._advance(states[row.flatten()], tokens.flatten(), depth)
            levels.append(self._children(states, rules[depth], chosen))
            values = (values.unsqueeze(2) + levels[-1].confidence).flatten(1)  # [S, W * K]
        return levels

    def _children(self, states: Tensor, rules: RankRules, parents: Tensor) -> Level:
        columns, confidence = rules.best(self._model.logits(states), self._branches)
        shape = (self._count, -1, self._branches)
        return Level(self._model.vocabulary.tokens(columns).view(shape), confidence.view(shape), parents)

    def _copy_lanes(self, depth: int, beam: Tensor) -> None:
        """Copy the blocks of the parent to each lane: the last block of the sequence at first, then the parent's lane."""
        if depth == 1:
            source, target = self._tails.repeat_interleave(self._width), self._lanes[:, :, 0].flatten()
        else:
            source = self._lanes.gather(1, beam.unsqueeze(2).expand(-1, -1, LANE_BLOCKS)).flatten()
            target = self._lanes.flatten()
        for values in (values for layer in self._runner.cache for values in layer):
            values[target] = values[source]  # all is read before anything is written

    def _advance(self, states: Tensor, tokens: Tensor, depth: int) -> Tensor:
        """Compute one slot in every lane: [S * W, D]."""
        contexts = self._contexts + (depth - 1)
        inside = self._contexts % BLOCK_SIZE + (depth - 1)
        block = self._lanes.flatten(0, 1).gather(1, (inside // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        layout = AttentionLayout(
            slots=block * BLOCK_SIZE + inside % BLOCK_SIZE,
            starts=self._starts,
            context_lens=contexts.to(torch.int32),
            block_tables=self._tables,
        )
        positions = self._positions + depth
        return self._model.forward(states, tokens, positions, layout, self._runner.cache, self._plan)


def choose(levels: Sequence[Level], budgets: Sequence[int], max_levels: Sequence[int | None]) -> list[Growth]:
    """The trees, read from the device at once; each within its budget of nodes and its `max_levels`."""
    tokens = torch.cat([level.tokens.flatten(1) for level in levels], 1).tolist()
    confidence = torch.cat([level.confidence.flatten(1) for level in levels], 1).tolist()
    parents = torch.cat([level.parents for level in levels], 1).tolist()
    trees = []
    for s, (budget, most) in enumerate(zip(budgets, max_levels, strict=True)):
        tree, row, beam = Growth(budget), 0, 0
        before: list[int] = []  # nodes of the level before, by index
        for depth, level in enumerate(levels[:most]):
            _, width, branches = level.tokens.shape
            nodes: list[int] = []
            for w in range(width):
                parent = before[parents[s][beam + w]] if depth else -1
                part = slice(row + w * branches, row + (w + 1) * branches)
                nodes.extend(tree.add(parent, zip(tokens[s][part], confidence[s][part], strict=True)))
            before, row, beam = nodes, row + width * branches, beam + width
        trees.append(tree)
    return trees


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
