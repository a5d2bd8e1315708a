"""Chains of a draft model, on the device."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.executors.graph.drafter import Drafts, DraftShape
from paceline.engine.executors.graph.rows import ChainRows
from paceline.engine.executors.graph.slots import DeviceSlots
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.models.gpu.runner import GpuRunner
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposer import Progress
from paceline.speculation.proposers.draft_model import DraftModelProposer

PATIENCE = 2
"""Rounds without drafts that the draft model reads along with: one now and then is plain only to be timed."""


class ChainDrafter:
    """Needs nothing from the target but its tokens. Rounds without drafts, one after another, leave the draft model behind."""

    state_layers: tuple[int, ...] = ()
    wants_states = False

    def __init__(self, proposer: DraftModelProposer, slots: DeviceSlots, vocab_size: int) -> None:
        assert isinstance(proposer.runner, GpuRunner)  # on a GPU every runner is one
        self._proposer, self._runner, self._slots = proposer, proposer.runner, slots
        self._vocab_size = vocab_size
        self.table_width = self._runner.table_width
        self.scratch_block = self._runner.scratch_block
        self._drafts: dict[DraftShape, Drafts] = {}
        self._current: set[int] = set()
        self._num_plain = 0  # rounds, since there were drafts

    @property
    def state(self) -> tuple[Tensor, ...]:
        return ()

    def bind(self, tables: Tensor) -> None:
        self._tables = tables

    def shape(self, depth: int) -> DraftShape:
        return DraftShape(depth, depth)

    @torch.inference_mode()
    def load(self, sequences: Seq[Sequence]) -> DraftPrefill:
        known = [sequence for sequence in sequences if sequence.depth or sequence.id in self._proposer]
        self._proposer.observe([Progress.of(sequence, sequence.depth) for sequence in known])
        prefill = self._proposer.catch_up([sequence.id for sequence in sequences if sequence.depth])
        self._current = {sequence.id for sequence in sequences if self._proposer.is_current(sequence.id)}
        self._num_plain = 0
        return prefill

    def has_room(self, sequence: Sequence) -> bool:
        """What `lend` would refuse behind another round is not worth catching up."""
        if sequence.id in self._current:
            return True
        return self._proposer.has_room(sequence.id, len(sequence.ids) + 2 * (sequence.depth + 1))

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        return all(sequence.id in self._current for sequence in sequences if sequence.depth)

    def reserve_blocks(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        if sequence.id not in self._current:
            return None
        blocks = self._proposer.lend(sequence.id, num_tokens)
        if blocks is None:  # nothing of this round is cached for it
            self._current.discard(sequence.id)
        return blocks

    def begin(self, shape: DraftShape) -> Literal["draft", "follow"] | None:
        if shape.nodes:
            self._num_plain = 0
            return "draft"
        self._num_plain += 1
        if self._num_plain > PATIENCE:
            self._current.clear()
        return "follow" if self._current else None

    def draft(self, shape: DraftShape) -> Callable[[], None]:
        """The first pass takes the last two committed tokens: after a full acceptance the draft has not seen the one before
        last, and computing it again otherwise changes nothing."""
        size, state = self._slots.size, self._slots.state
        first, others = (ChainRows(self._runner, self._tables, size, rows) for rows in (2, 1))
        choose, drafts = self._slots.picker(1), self.drafts(shape).tokens

        def compute() -> None:
            logits = self._logits(first, state.last.flatten(), -2)
            drafts[:, 0] = choose(logits, first.next_positions())
            for step in range(1, shape.nodes):
                logits = self._logits(others, drafts[:, step - 1].contiguous(), step - 1)
                drafts[:, step] = choose(logits, others.next_positions())

        return compute

    def follow(self) -> Callable[[], None]:
        rows, state = ChainRows(self._runner, self._tables, self._slots.size, 2), self._slots.state

        def compute() -> None:
            self._logits(rows, state.last.flatten(), -2)

        return compute

    def _logits(self, rows: ChainRows, tokens: Tensor, offset: int) -> Tensor:
        """After each sequence's last row; the first lies at logical index length + offset."""
        known = self._proposer.num_proposable
        if known < self._vocab_size:  # any token stands in for one it does not have
            tokens = torch.where(tokens < known, tokens, 0)
        output = rows.forward(tokens, self._slots.state.lengths, offset, last_only=True)
        assert output.logits is not None
        return output.logits[:, :known]

    def drafts(self, shape: DraftShape) -> Drafts:
        if shape not in self._drafts:
            tokens = torch.zeros(self._slots.size, shape.nodes, dtype=torch.int64, device=self._slots.device)
            self._drafts[shape] = Drafts(tokens, None)
        return self._drafts[shape]

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """Tokens are enough."""

    def return_sequences(self, running: Seq[Sequence]) -> None:
        for sequence in running:
            if sequence.id in self._current:
                self._proposer.take_back(sequence.id, max(0, len(sequence.ids) - 2))
        self._current.clear()
