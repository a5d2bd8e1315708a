"""Drafts chains with a draft model inside CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Literal

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.graph.drafter import DraftPrefills, DraftShape, DraftTensors
from paceline.engine.graph.rows import ChainRows
from paceline.engine.graph.slot_params import Sampling
from paceline.engine.graph.slots import DeviceSlots
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.kernels.gpu.speculation.edits import DraftedRows
from paceline.models.device import StreamEvent
from paceline.models.runner.gpu import GpuRunner
from paceline.speculation import SequenceProgress
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.model import DraftModelProposer

MAX_FOLLOWED_ROUNDS = 2
"""Consecutive rounds without drafts that the draft model follows. After more of them it needs a draft prefill."""


class ChainDrafter:
    """A `GraphDrafter` for the proposer `draft_model`, with the model, block tables and sequences of its `ModelDrafter`."""

    state_layers: tuple[int, ...] = ()
    wants_states = False
    edits_logits = True

    def __init__(
        self, proposer: DraftModelProposer, slots: DeviceSlots, vocab_size: int, prefills: DraftPrefills
    ) -> None:
        """`vocab_size` is the target's."""
        runner = proposer.drafter.runner
        assert isinstance(runner, GpuRunner)
        self._proposer, self._drafter, self._runner, self._slots = proposer, proposer.drafter, runner, slots
        self._vocab_size, self._prefills = vocab_size, prefills
        self.table_width = self._runner.table_width
        self.scratch_block = self._runner.scratch_block
        self._drafts: dict[DraftShape, DraftTensors] = {}
        self._current: set[int] = set()
        """Sequences of which at most two tokens are missing in the draft's cache."""
        self._num_plain = 0
        """Rounds since the last draft."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def is_idle(self) -> bool:
        return not self._current

    def bind(self, tables: Tensor) -> None:
        self._tables = tables

    def shape(self, depth: int) -> DraftShape:
        return DraftShape(depth, depth)

    @torch.inference_mode()
    def load(self, sequences: Seq[Sequence]) -> DraftPrefill:
        known = [sequence for sequence in sequences if sequence.depth or self._proposer.sequence(sequence.id)]
        self._proposer.observe([SequenceProgress.of(sequence, sequence.depth) for sequence in known])
        prefill = self._proposer.prefill([sequence.id for sequence in sequences if sequence.depth])
        self._current = {sequence.id for sequence in sequences if self._is_current(sequence.id)}
        self._num_plain = 0
        return prefill

    def behind(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """The sequences that want drafts and need a draft prefill."""
        return [sequence for sequence in sequences if sequence.depth and sequence.id not in self._current]

    def next_behind(self, sequences: Seq[Sequence]) -> tuple[Sequence, ...]:
        """The first sequences that need a draft prefill, as many as the device computes during one pass of the target."""
        chosen, budget = [], self._proposer.max_gap
        for sequence in self.behind(sequences):
            if budget <= 0:
                break
            cached = self._proposer.sequence(sequence.id)
            budget -= len(sequence.ids) - (cached.num_cached if cached is not None else 0)
            chosen.append(sequence)
        return tuple(chosen)

    @torch.inference_mode()
    def join(self, sequences: Seq[Sequence], drafted: StreamEvent, num_unknown: int = 0) -> StreamEvent | None:
        """Queue the draft prefill of these sequences behind `drafted`, the drafts of the step just submitted. When that step
        ends they have one token more than the host knows now, and `num_unknown` more if they are in the step before it, which
        is in flight. Returns the end of the prefill, None if there is nothing to compute."""
        self._proposer.observe([SequenceProgress.of(sequence, 0) for sequence in sequences])
        joining, drafter = [], self._drafter
        for sequence in sequences:
            cached, num_tokens = self._proposer.sequence(sequence.id), len(sequence.ids)
            if cached is not None and drafter.is_in_window(num_tokens) and drafter.reserve(cached, num_tokens):
                joining.append(cached)
                self._current.add(sequence.id)
        self._num_plain = 0
        # The first drafting pass computes two tokens of every sequence
        return self._prefills.submit(joining, drafted, 1 - num_unknown) if joining else None

    def take_over(self, other: "ChainDrafter") -> None:
        """Continue with the sequences of a batch of another size, in the same slots."""
        self._current, other._current = other._current, set()
        self._num_plain = other._num_plain

    def forget(self, sequence_ids: Iterable[int]) -> None:
        self._current.difference_update(sequence_ids)

    def _is_current(self, sequence_id: int) -> bool:
        cached = self._proposer.sequence(sequence_id)
        return cached is not None and self._drafter.is_open(cached) and cached.num_missing <= 2

    def has_room(self, sequence: Sequence) -> bool:
        if sequence.id in self._current:
            return True
        # Room for two rounds: a prefill for a single one is not worth its cost
        num_tokens = len(sequence.ids) + 2 * (sequence.depth + 1)
        return self._drafter.has_room(self._proposer.sequence(sequence.id), num_tokens)

    def can_draft(self, sequences: Seq[Sequence]) -> bool:
        return all(sequence.id in self._current for sequence in sequences if sequence.depth)

    def reserve_blocks(self, sequence: Sequence, num_tokens: int, shape: DraftShape) -> Seq[int] | None:
        if sequence.id not in self._current:
            return None
        cached, drafter = self._proposer.sequence(sequence.id), self._drafter
        can_reserve = cached is not None and drafter.is_open(cached) and drafter.is_in_window(num_tokens)
        if cached is None or not can_reserve or not drafter.reserve(cached, num_tokens):
            self._current.discard(sequence.id)  # the cache will lack the tokens of this round
            return None
        return drafter.tables.blocks(cached.id)

    def begin(self, shape: DraftShape) -> Literal["draft", "follow"] | None:
        if shape.nodes:
            self._num_plain = 0
            return "draft"
        self._num_plain += 1
        if self._num_plain > MAX_FOLLOWED_ROUNDS:
            self._current.clear()
        return "follow" if self._current else None

    def draft(self, shape: DraftShape, sampling: Sampling) -> Callable[[], None]:
        """The first pass computes the last two committed tokens: after a full acceptance the draft's cache lacks these two."""
        size, state = self._slots.size, self._slots.state
        first, others = (ChainRows(self._runner, self._tables, size, rows) for rows in (2, 1))
        choose, drafts = self._slots.picker(1, sampling), self.drafts(shape).tokens

        def compute() -> None:
            logits = self._logits(first, state.last.flatten(), -2)
            drafts[:, 0] = choose(logits, first.next_positions(), None)
            for step in range(1, shape.nodes):
                logits = self._logits(others, drafts[:, step - 1].contiguous(), step - 1)
                drafts[:, step] = choose(logits, others.next_positions(), DraftedRows(drafts, 1, size, first=step))

        return compute

    def follow(self) -> Callable[[], None]:
        rows, state = ChainRows(self._runner, self._tables, self._slots.size, 2), self._slots.state

        def compute() -> None:
            self._logits(rows, state.last.flatten(), -2)

        return compute

    def _logits(self, rows: ChainRows, tokens: Tensor, offset: int) -> Tensor:
        """Logits after each sequence's last row; its first row has the index length + offset."""
        known = self._drafter.num_proposable
        if known < self._vocab_size:  # 0 replaces tokens outside the draft's vocabulary
            tokens = torch.where(tokens < known, tokens, 0)
        output = rows.forward(tokens, self._slots.state.lengths, offset, last_only=True)
        assert output.logits is not None
        return output.logits[:, :known]

    def drafts(self, shape: DraftShape) -> DraftTensors:
        if shape not in self._drafts:
            tokens = torch.zeros(self._slots.size, shape.nodes, dtype=torch.int64, device=self._slots.device)
            self._drafts[shape] = DraftTensors(tokens, None)
        return self._drafts[shape]

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """The draft model needs no hidden states."""

    def return_sequences(self, running: Seq[Sequence]) -> None:
        for sequence in running:
            cached = self._proposer.sequence(sequence.id)
            if cached is not None and sequence.id in self._current:
                cached.commit(sequence.ids)
                self._drafter.mark_computed(cached, max(0, len(sequence.ids) - 2))
        self._current.clear()
