"""Trees of an EAGLE head, grown on the device from the hidden states of the pass before."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.executors.graph.drafter import Drafts, DraftShape
from paceline.engine.executors.graph.slots import DeviceSeats
from paceline.engine.executors.graph.tree_growth import SHAPES, TreeGrowth, fresh_pass
from paceline.kernels.gpu.attention_plan import AttentionScratch
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.kernels.gpu.speculation.head_rows import fresh_states, keep_fresh
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.speculation.proposer import Hidden
from paceline.speculation.proposers.eagle import EagleProposer, Loan

FRESH = 1 + max(shape.levels for shape in SHAPES.values())
"""States of committed tokens that wait for the head: a round brings as many at most."""
ROOM = FRESH + max((shape.levels - 1) * shape.width for shape in SHAPES.values())
"""Slots that a round may write past the committed ones."""


class TreeDrafter:
    """Keeps up through rounds without drafts too: their states wait until the head runs or there is no more room for them."""

    def __init__(self, proposer: EagleProposer, seats: DeviceSeats) -> None:
        self._proposer, self._seats, self._runner = proposer, seats, proposer.runner
        model = self._runner.model
        self.capture = model.config.capture
        self.scratch_block = self._runner.lane(0)[0]  # lanes are for trees that the host grows, never at the same time
        longest = min(self._runner.num_blocks * BLOCK_SIZE, len(model.cos))
        self.table_width = blocks_for(longest + ROOM) + 1
        width = len(self.capture) * model.config.hidden_size
        self._fresh = fresh_states(seats.size, FRESH, width, model.dtype, seats.device)
        self._scratch = AttentionScratch(seats.device)
        self._growths: dict[DraftShape, TreeGrowth] = {}
        self._boarded: list[int] = []
        self._current: set[int] = set()
        self._num_fresh = 0  # at most, of any sequence

    @property
    def state(self) -> tuple[Tensor, ...]:
        return self._fresh.counts, self._fresh.num_cached

    @property
    def wants_states(self) -> bool:
        return bool(self._current)

    def bind(self, tables: Tensor) -> None:
        self._tables = tables

    def shape(self, depth: int) -> DraftShape:
        # A verified row costs whether it is wanted or not: a few nodes less are better than twice as many rows
        nodes = next((nodes for nodes in SHAPES if nodes >= 0.8 * depth), max(SHAPES))
        return DraftShape(nodes, SHAPES[nodes].levels)

    @torch.inference_mode()
    def board(self, sequences: Seq[Sequence]) -> None:
        self._boarded = [sequence.id for sequence in sequences]
        # Nothing is computed for sequences that want no drafts
        loans = self._proposer.lend([sequence.id for sequence in sequences if sequence.depth])
        self._current = set(loans)
        if loans:
            self._write([loans.get(sequence.id) for sequence in sequences], [s.ids[-1] for s in sequences])

    def _write(self, loans: Seq[Loan | None], newest: Seq[int]) -> None:
        """One fresh state each, the last: its slot is computed once more."""
        fresh, count = self._fresh, len(loans)
        for tensor in (fresh.counts, fresh.num_cached, fresh.tokens):
            tensor.zero_()
        fresh.counts[:count] = torch.tensor([int(loan is not None) for loan in loans], dtype=torch.int32)
        cached = [loan.num_cached if loan else 0 for loan in loans]
        fresh.num_cached[:count] = torch.tensor(cached, dtype=torch.int32)
        fresh.tokens[:count, 0] = torch.tensor(newest)
        width = self._runner.model.config.hidden_size
        for seat, loan in enumerate(loans):
            if loan is not None:
                states = [loan.state.inner[layer][0, :width] for layer in self.capture]
                fresh.states[seat, 0] = torch.cat(states)
        self._num_fresh = 1

    def has_room(self, sequence: Sequence) -> bool:
        """The host begins anew, with a cache of a few slots."""
        return True

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        return all(sequence.id in self._current for sequence in sequences if sequence.depth)

    def lend(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        """In rounds without drafts too: states that wait may have to be cached."""
        if sequence.id not in self._current:
            return None
        blocks = self._proposer.blocks(sequence.id, num_tokens + ROOM)
        if blocks is None:  # its states go where padding does: nothing that is cached can be gone on from
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
        return self._growth(shape).part(self._seats.sampling)

    def follow(self) -> Callable[[], None]:
        run = fresh_pass(self._runner, self._fresh, self._tables, self._seats, self._scratch)

        def compute() -> None:
            run()

        return compute

    def drafts(self, shape: DraftShape) -> Drafts:
        growth = self._growth(shape)
        return Drafts(growth.tokens, growth.parents)

    def keep(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        layers = [inner[layer] for layer in self.capture]
        keep_fresh(self._fresh, layers, path.rows, path.counts, path.tokens, active)

    @torch.inference_mode()
    def take_back(self, running: Seq[Sequence]) -> None:
        if self._current:
            ids = {sequence.id: sequence.ids for sequence in running if sequence.id in self._current}
            counts, cached = self._fresh.counts.tolist(), self._fresh.num_cached.tolist()
            width = self._runner.model.config.hidden_size
            for seat, sequence_id in enumerate(self._boarded):
                if sequence_id in ids:
                    states = self._fresh.states[seat, : counts[seat]].unflatten(1, (-1, width)).unbind(1)
                    start = len(ids[sequence_id]) - 1 - counts[seat]
                    hidden = Hidden(start, dict(zip(self.capture, states, strict=True)), None)
                    self._proposer.take_back(sequence_id, cached[seat], hidden)
        self._current.clear()

    def _growth(self, shape: DraftShape) -> TreeGrowth:
        if shape not in self._growths:
            self._growths[shape] = TreeGrowth(
                self._runner, self._fresh, self._tables, self._seats, self._scratch, shape.nodes
            )
        return self._growths[shape]
