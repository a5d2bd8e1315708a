"""Drafts chains with a draft model inside CUDA graphs."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.engine.graph.drafter import DraftPart, DraftPrefills, DraftShape, DraftTensors
from paceline.engine.graph.rows import ChainRows
from paceline.engine.graph.slot_params import Sampling
from paceline.engine.graph.slots import DeviceSlots
from paceline.kernels.gpu.speculation.accept_tree import AcceptedPath
from paceline.kernels.gpu.speculation.chain_steps import ChainSteps, append_drafts, begin_chains
from paceline.kernels.gpu.speculation.edits import DraftedRows
from paceline.models.device import StreamEvent
from paceline.models.runner.gpu import GpuRunner
from paceline.speculation import SequenceProgress
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.model import DraftModelProposer

_ONE_TOKEN = DraftShape(1, 1)
"""Shape of the graphs of a drafting pass. They serve drafts of any length."""

MAX_FOLLOWED_ROUNDS = 2
"""Consecutive rounds without drafts that the draft model follows. After more of them it needs a draft prefill."""


class ChainDrafter:
    """A `GraphDrafter` for the proposer `draft_model`, with the model, block tables and sequences of its `ModelDrafter`.

    The first pass of a round is one graph, and every further pass is another, which is replayed for each token.
    """

    state_layers: tuple[int, ...] = ()
    wants_states = False
    edits_logits = True

    def __init__(
        self,
        proposer: DraftModelProposer,
        slots: DeviceSlots,
        vocab_size: int,
        prefills: DraftPrefills,
        max_depth: int,
    ) -> None:
        """`vocab_size` is the target's."""
        runner = proposer.drafter.runner
        assert isinstance(runner, GpuRunner)
        self._proposer, self._drafter, self._runner, self._slots = proposer, proposer.drafter, runner, slots
        self._vocab_size, self._prefills = vocab_size, prefills
        self.table_width = self._runner.table_width
        self.scratch_block = self._runner.scratch_block
        self._steps = ChainSteps.of(slots.size, max(1, max_depth), slots.device)
        self._current: set[int] = set()
        """Sequences of which at most two tokens are missing in the draft's cache."""
        self._num_plain = 0
        """Rounds since the last draft."""

    @property
    def state(self) -> tuple[Tensor, ...]:
        steps = self._steps
        return steps.tokens, steps.newest, steps.lengths, steps.column

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

    def begin(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        if shape.nodes:
            self._num_plain = 0
            return self.parts(shape)
        self._num_plain += 1
        if self._num_plain > MAX_FOLLOWED_ROUNDS:
            self._current.clear()
        return (DraftPart("follow", shape),) if self._current else ()

    def parts(self, shape: DraftShape) -> tuple[DraftPart, ...]:
        return DraftPart("draft", _ONE_TOKEN), *[DraftPart("extend", _ONE_TOKEN)] * (shape.nodes - 1)

    def work(self, part: DraftPart, sampling: Sampling) -> Callable[[], None]:
        if part.name == "draft":
            return self._draft(sampling)
        return self._extend(sampling) if part.name == "extend" else self._follow()

    def _draft(self, sampling: Sampling) -> Callable[[], None]:
        """The first pass computes the last two committed tokens: after a full acceptance the draft's cache lacks these two."""
        slots, state, steps = self._slots, self._slots.state, self._steps
        rows, choose = ChainRows(self._runner, self._tables, slots.size, 2), slots.picker(1, sampling)

        def compute() -> None:
            begin_chains(steps, state.lengths)
            logits = self._logits(rows, state.last.flatten(), state.lengths, -2)
            append_drafts(steps, choose(logits, rows.next_positions(), None))

        return compute

    def _extend(self, sampling: Sampling) -> Callable[[], None]:
        """A pass over the newest draft of every slot."""
        size, steps = self._slots.size, self._steps
        rows, choose = ChainRows(self._runner, self._tables, size, 1), self._slots.picker(1, sampling)
        # Drafts that are missing have an id that no token has
        drafted = DraftedRows(steps.tokens, 1, size, first=steps.tokens.shape[1])

        def compute() -> None:
            logits = self._logits(rows, steps.newest, steps.lengths, -1)
            append_drafts(steps, choose(logits, rows.next_positions(), drafted))

        return compute

    def _follow(self) -> Callable[[], None]:
        rows, state = ChainRows(self._runner, self._tables, self._slots.size, 2), self._slots.state

        def compute() -> None:
            self._logits(rows, state.last.flatten(), state.lengths, -2)

        return compute

    def _logits(self, rows: ChainRows, tokens: Tensor, lengths: Tensor, offset: int) -> Tensor:
        """Logits after each sequence's last row; its first row has the index length + offset."""
        known = self._drafter.num_proposable
        if known < self._vocab_size:  # 0 replaces tokens outside the draft's vocabulary
            tokens = torch.where(tokens < known, tokens, 0)
        output = rows.forward(tokens, lengths, offset, last_only=True)
        assert output.logits is not None
        return output.logits[:, :known]

    def drafts(self, shape: DraftShape) -> DraftTensors:
        return DraftTensors(self._steps.tokens[:, : shape.nodes], None)

    def keep_states(self, inner: Mapping[int, Tensor], path: AcceptedPath, active: Tensor) -> None:
        """The draft model needs no hidden states."""

    def return_sequences(self, running: Seq[Sequence]) -> None:
        for sequence in running:
            cached = self._proposer.sequence(sequence.id)
            if cached is not None and sequence.id in self._current:
                cached.commit(sequence.ids)
                self._drafter.mark_computed(cached, max(0, len(sequence.ids) - 2))
        self._current.clear()
