"""Trees grown on the device: every level has the same width, and the host reads all levels at the end.

On a GPU, waiting for a level costs more than computing it. Nodes that are not among the best are dropped when the host chooses
the draft: the result is the same as that of growing only the best nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE, AttentionLayout
from paceline.models.drafts.eagle import LANE_BLOCKS, EagleRunner
from paceline.speculation.trees.growth import Growth
from paceline.speculation.trees.ranking import RankRules


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
        for values in self._runner.cache:
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
