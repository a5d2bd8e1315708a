"""A draft tree grown on the device: the head computes the new hidden states, then each level from the best nodes of the last.

Drafted positions follow the committed ones of their sequence, `width` of them a level. A row attends to its ancestors among
them, and the context is read once for all branches.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.engine.executors.graph.slots import DeviceSlots, Sampling
from paceline.kernels.gpu.attention.plan import AttentionScratch
from paceline.kernels.gpu.linear import Normed
from paceline.kernels.gpu.speculation.growth import candidate_buffers, choose_nodes, grow_level
from paceline.kernels.gpu.speculation.head_rows import FreshStates, HeadPlaces, head_places, place_fresh
from paceline.kernels.gpu.speculation.ranking import RankedTokens, RankScratch, rank_rows, rank_scratch
from paceline.kernels.layout import AttentionLayout
from paceline.models.drafts.eagle import EagleRunner
from paceline.models.gpu.eagle import gpu_eagle_logits, gpu_eagle_pass, plan_eagle, product
from paceline.speculation.trees.ranking import RankRules


@dataclass(frozen=True, slots=True)
class TreeShape:
    levels: int
    """Longest path; each level is one pass of the head."""
    width: int
    """Nodes of a level that get children."""
    branches: int
    """Children of a node."""


SHAPES = {
    1: TreeShape(1, 1, 1),
    3: TreeShape(3, 2, 2),
    7: TreeShape(5, 4, 4),
    15: TreeShape(6, 8, 8),
    31: TreeShape(7, 8, 8),
}
"""Shapes by number of nodes; large batches use the small ones. With the last committed token the rows are powers of two, which
suits the matrix kernels."""


def fresh_pass(
    runner: EagleRunner,
    fresh: FreshStates,
    tables: Tensor,
    slots: DeviceSlots,
    scratch: AttentionScratch,
    places: HeadPlaces | None = None,
) -> Callable[[], tuple[Tensor, Normed]]:
    """A function that computes and caches the new hidden states, and returns the head's states [S * F, D]."""
    batch, rows = fresh.tokens.shape
    model = runner.model
    at = places or head_places(batch, rows, 1, 1, slots.device)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=slots.device)
    layout = AttentionLayout(at.positions, starts, at.contexts, tables)  # slots: found by the kernels
    plan = plan_eagle(model, batch * rows, batch, scratch)

    def run() -> tuple[Tensor, Normed]:
        place_fresh(slots.state.lengths, fresh, at, len(model.cos))
        fused = product(fresh.states.flatten(0, 1), model.fc)
        return gpu_eagle_pass(model, fused, None, fresh.tokens.flatten(), at.positions, layout, runner.cache, plan)

    return run


class TreeGrowth:
    """Trees of `nodes` nodes for every slot, best nodes first, so that a tree that is cut keeps the better part."""

    def __init__(
        self,
        runner: EagleRunner,
        fresh: FreshStates,
        tables: Tensor,
        slots: DeviceSlots,
        scratch: AttentionScratch,
        nodes: int,
    ) -> None:
        self._runner, self._fresh, self._tables, self._slots = runner, fresh, tables, slots
        self._scratch = scratch
        size, device = slots.size, slots.device
        self._columns = runner.model.vocabulary.head.shape[0]
        shape = SHAPES[nodes]
        self._levels = shape.levels
        self._branches = min(shape.branches, self._columns)
        self._width = min(shape.width, self._branches)
        self.tokens = torch.zeros(size, nodes, dtype=torch.int64, device=device)
        self.parents = torch.full((size, nodes), -1, dtype=torch.int32, device=device)
        self._candidates, self._beams = candidate_buffers(size, self._levels, self._width, self._branches, device)
        starts = torch.arange(0, size * self._width + 1, self._width, dtype=torch.int32, device=device)
        self._layouts = [
            AttentionLayout(beams.rows, starts, fresh.num_cached, tables, beams.lineage.flatten())
            for beams in self._beams
        ]
        self._plan = plan_eagle(runner.model, size * self._width, size, scratch)

    def part(self, sampling: Sampling) -> Callable[[], None]:
        """A function that grows the trees and chooses their nodes, ranked by the sampling of the slots."""
        slots, runner, model, width = self._slots, self._runner, self._runner.model, self._width
        places = head_places(slots.size, self._fresh.tokens.shape[1], self._levels, width, slots.device)
        enter = fresh_pass(runner, self._fresh, self._tables, slots, self._scratch, places)
        rankings = [self._ranking(sampling, rows) for rows in (1, width)]

        def compute() -> None:
            states, normed = enter()
            states = states[places.last_rows]
            children = rankings[0](gpu_eagle_logits(model, normed, places.last_rows), 0)
            for level in range(self._levels):
                before, after = self._beams[level % 2], self._beams[(level + 1) % 2]
                if level:
                    states, normed = gpu_eagle_pass(
                        model,
                        states,
                        before.rows,
                        before.tokens,
                        places.level_positions[level - 1],
                        self._layouts[level % 2],
                        runner.cache,
                        self._plan,
                        (level - 1) * width,
                    )
                    children = rankings[1](gpu_eagle_logits(model, normed), level)
                grow_level(children, level, before, self._candidates, after)
            choose_nodes(self._candidates, self.tokens, self.parents)

        return compute

    def _ranking(self, sampling: Sampling, rows: int) -> Callable[[Tensor, int], RankedTokens]:
        """A function (logits of `rows` rows a slot, level) -> the children of each row."""
        slots, ids = self._slots, self._runner.model.vocabulary.ids
        total = slots.size * rows
        scratch: dict[int, RankScratch] = {}

        def scratch_for(columns: int) -> RankScratch:
            if columns not in scratch:
                scratch[columns] = rank_scratch(total, columns, self._branches, slots.device)
            return scratch[columns]

        def rank(logits: Tensor, level: int) -> RankedTokens:
            noise = slots.tensors.temperature, slots.tensors.streams, slots.state.lengths
            if sampling != "truncated":
                return rank_rows(logits, ids, sampling, *noise, level, scratch_for(self._columns))
            scores, columns = self._rules(rows).truncated(logits.float())
            tokens = self._runner.model.vocabulary.tokens(columns)
            return rank_rows(scores, tokens, "ranked", *noise, level, scratch_for(scores.shape[1]))

        return rank

    def _rules(self, rows: int) -> RankRules:
        slots = self._slots

        def spread(values: Tensor) -> Tensor:
            return values.repeat_interleave(rows).unsqueeze(1)

        return RankRules(
            temperature=spread(torch.where(slots.tensors.temperature > 0.0, slots.tensors.temperature, 1.0)),
            noise=None,
            top_k=spread(torch.where(slots.tensors.top_k > 0, slots.tensors.top_k, self._columns)),
            top_p=spread(torch.where(slots.tensors.top_p < 1.0, slots.tensors.top_p, 2.0).float()),
            min_p=spread(slots.tensors.min_p.log()),
        )
