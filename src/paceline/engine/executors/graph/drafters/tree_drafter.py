"""Draft trees of an EAGLE head, grown inside a graph step from the hidden states of the step before."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.executors.graph.drafters.drafter import DraftShape, DraftTensors
from paceline.engine.executors.graph.drafters.tree_growth import SHAPES, TreeGrowth, fresh_pass
from paceline.engine.executors.graph.slots import DeviceSlots
from paceline.kernels.gpu.attention.plan import AttentionScratch
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.kernels.gpu.speculation.head_rows import fresh_states, keep_fresh
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposer import HiddenRows
from paceline.speculation.proposers.eagle import EagleProposer, GraphStart

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

    def __init__(self, proposer: EagleProposer, slots: DeviceSlots) -> None:
        self._proposer, self._slots, self._runner = proposer, slots, proposer.runner
        model = self._runner.model
        self.state_layers = model.config.state_layers
        self.scratch_block = self._runner.lane(0)[
            0
        ]  # lanes belong to trees that the host grows, never at the same time
        longest = min(self._runner.num_blocks * BLOCK_SIZE, len(model.cos))
        self.table_width = blocks_for(longest + ROOM) + 1
        width = len(self.state_layers) * model.config.hidden_size
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
        width = self._runner.model.config.hidden_size
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

    def begin(self, shape: DraftShape) -> Literal["draft", "follow"] | None:
        if shape.nodes:
            self._num_fresh = shape.levels + 1
            return "draft"
        if self._num_fresh < FRESH:
            self._num_fresh += 1
            return None
        self._num_fresh = 1
        return "follow" if self._current else None

    def draft(self, shape: DraftShape) -> Callable[[], None]:
        return self._growth(shape).part(self._slots.sampling)

    def follow(self) -> Callable[[], None]:
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
            width = self._runner.model.config.hidden_size
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
