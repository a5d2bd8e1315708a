"""Draft trees of an EAGLE head, grown inside a graph step from the hidden states of the step before.

`TreeGrowth` grows a tree on the device: the head computes the new hidden states, then each level from the best nodes of the
last. Drafted positions follow the committed ones of their sequence, `width` of them a level. A row attends to its ancestors
among them, and the context is read once for all branches. `TreeDrafter` connects this growth to the graph step.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE, Sequence
from paceline.engine.graph.drafter import DraftPart, DraftShape, DraftTensors
from paceline.engine.graph.slot_params import PickKind, Sampling
from paceline.engine.graph.slots import DeviceSlots
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.gpu.attention.plan import AttentionScratch
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.kernels.gpu.speculation.growth import candidate_buffers, choose_nodes, grow_level
from paceline.kernels.gpu.speculation.head_rows import (
    FreshStates,
    HeadPlaces,
    fresh_states,
    head_places,
    keep_fresh,
    place_fresh,
)
from paceline.kernels.gpu.speculation.ranking import RankedTokens, RankScratch, rank_rows, rank_scratch
from paceline.kv import blocks_for
from paceline.models.heads.eagle import EagleRunner, gpu_eagle_logits, gpu_eagle_pass, gpu_eagle_states, plan_eagle
from paceline.speculation import HiddenRows
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.eagle import EagleProposer, GraphStart
from paceline.speculation.trees import RankRules


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
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that computes and caches the new hidden states, and returns the head's states [S * F, D]."""
    batch, rows = fresh.tokens.shape
    model = runner.model
    at = places or head_places(batch, rows, 1, 1, slots.device)
    starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=slots.device)
    layout = AttentionLayout(at.positions, starts, at.contexts, tables)  # slots: found by the kernels
    plan = plan_eagle(model, batch * rows, batch, scratch)

    def run() -> tuple[Tensor, Tensor]:
        place_fresh(slots.state.lengths, fresh, at, len(model.cos))
        fused = gpu_eagle_states(model, fresh.states.flatten(0, 1))
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

    def part(self, sampling: PickKind) -> Callable[[], None]:
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

    def _ranking(self, sampling: PickKind, rows: int) -> Callable[[Tensor, int], RankedTokens]:
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


FRESH = 1 + max(shape.levels for shape in SHAPES.values())
"""Hidden states of committed tokens that the head has not computed yet: at most as many as one step commits."""
ROOM = FRESH + max((shape.levels - 1) * shape.width for shape in SHAPES.values())
"""Cache positions that a step may write past the committed ones."""


def tree_shape(depth: int) -> DraftShape:
    """The shape for trees of up to `depth` nodes. Every row of a shape is verified: a few nodes less are cheaper than twice as
    many rows."""
    nodes = next((nodes for nodes in SHAPES if nodes >= 0.8 * depth), max(SHAPES))
    return DraftShape(nodes, SHAPES[nodes].levels)


class TreeDrafter:
    """Stores the hidden states of steps without drafts too, until the head runs or the buffer is full."""

    edits_logits = False
    """The logits of a head are ranked as they are: a tree has alternatives to the token that a penalty excludes."""

    def __init__(self, proposer: EagleProposer, slots: DeviceSlots) -> None:
        self._proposer, self._slots, self._runner = proposer, slots, proposer.runner
        model = self._runner.model
        self.state_layers = model.config.state_layers
        self.scratch_block = self._runner.lane(0)[
            0
        ]  # lanes belong to trees that the host grows, never at the same time
        longest = min(self._runner.num_blocks * BLOCK_SIZE, len(model.cos))
        self.table_width = blocks_for(longest + ROOM) + 1
        width = len(self.state_layers) * model.config.state_size
        self._fresh = fresh_states(slots.size, FRESH, width, model.dtype, slots.device)
        self._scratch = AttentionScratch(slots.device)
        self._growths: dict[DraftShape, TreeGrowth] = {}
        self._loaded: list[int] = []
        self._current: set[int] = set()
        self._num_fresh = 0  # upper bound over the sequences

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self._fresh.counts, self._fresh.num_cached

    @property
    def wants_states(self) -> bool:
        return bool(self._current)

    @property
    def is_idle(self) -> bool:
        return not self._current

    def bind(self, tables: Tensor) -> None:
        self._tables = tables

    def shape(self, depth: int) -> DraftShape:
        return tree_shape(depth)

    @torch.inference_mode()
    def load(self, sequences: Seq[Sequence]) -> DraftPrefill:
        self._loaded = [sequence.id for sequence in sequences]
        # Sequences without a depth cost nothing
        starts, prefill = self._proposer.begin_graph([sequence.id for sequence in sequences if sequence.depth])
        self._current = set(starts)
        if starts:
            self._write([starts.get(sequence.id) for sequence in sequences], [s.ids[-1] for s in sequences])
        return prefill

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._current.difference_update(sequence_ids)

    def _write(self, starts: Seq[GraphStart | None], newest: Seq[int]) -> None:
        """Write one hidden state for each sequence, the last: its cache position is computed again."""
        fresh, count = self._fresh, len(starts)
        for tensor in (fresh.counts, fresh.num_cached, fresh.tokens):
            tensor.zero_()
        fresh.counts[:count] = torch.tensor([int(start is not None) for start in starts], dtype=torch.int32)
        cached = [start.num_cached if start else 0 for start in starts]
        fresh.num_cached[:count] = torch.tensor(cached, dtype=torch.int32)
        fresh.tokens[:count, 0] = torch.tensor(newest)
        width = self._runner.model.config.state_size
        for slot, start in enumerate(starts):
            if start is not None:
                states = [start.state.by_layer[layer][0, :width] for layer in self.state_layers]
                fresh.states[slot, 0] = torch.cat(states)
        self._num_fresh = 1

    def has_room(self, sequence: Sequence) -> bool:
        """Always: the host starts a new cache of a few positions."""
        return True

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        return all(sequence.id in self._current for sequence in sequences if sequence.depth)

    def reserve_blocks(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        """Steps without drafts need blocks too: `follow` may cache the stored states."""
        if sequence.id not in self._current:
            return None
        blocks = self._proposer.blocks(sequence.id, num_tokens + ROOM)
        if blocks is None:  # its states go to the scratch block: the cache cannot be continued
            self._current.discard(sequence.id)
            self._proposer.close([sequence.id])
        return blocks

    def begin(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        if shape.nodes:
            self._num_fresh = shape.levels + 1
            return self.parts(shape)
        if self._num_fresh < FRESH:
            self._num_fresh += 1
            return ()
        self._num_fresh = 1
        return (DraftPart("follow", shape),) if self._current else ()

    def parts(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        return (DraftPart("draft", shape),)

    def work(self, part: DraftPart, sampling: Sampling) -> Callable[[], None]:
        if part.name == "draft":
            return self._growth(part.shape).part(sampling.kind)
        run = fresh_pass(self._runner, self._fresh, self._tables, self._slots, self._scratch)

        def compute() -> None:
            run()

        return compute

    def drafts(self, shape: DraftShape) -> DraftTensors:
        growth = self._growth(shape)
        return DraftTensors(growth.tokens, growth.parents)

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        layers = [inner[layer] for layer in self.state_layers]
        keep_fresh(self._fresh, layers, path.rows, path.counts, path.tokens, active)

    @torch.inference_mode()
    def return_sequences(self, running: Seq[Sequence]) -> None:
        if self._current:
            ids = {sequence.id: sequence.ids for sequence in running if sequence.id in self._current}
            counts, cached = self._fresh.counts.tolist(), self._fresh.num_cached.tolist()
            width = self._runner.model.config.state_size
            for slot, sequence_id in enumerate(self._loaded):
                if sequence_id in ids:
                    states = self._fresh.states[slot, : counts[slot]].unflatten(1, (-1, width)).unbind(1)
                    start = len(ids[sequence_id]) - 1 - counts[slot]
                    hidden = HiddenRows(start, dict(zip(self.state_layers, states, strict=True)), None)
                    self._proposer.end_graph(sequence_id, cached[slot], hidden)
        self._current.clear()

    def _growth(self, shape: DraftShape) -> TreeGrowth:
        if shape not in self._growths:
            self._growths[shape] = TreeGrowth(
                self._runner, self._fresh, self._tables, self._slots, self._scratch, shape.nodes
            )
        return self._growths[shape]
