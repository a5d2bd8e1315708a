"""The cache of an EAGLE head or a block drafter: committed tokens of every sequence, with the target's hidden states.

`PendingStates` keeps, in bounded memory, hidden states that a proposer observed and has not computed yet.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kv import BlockTables
from paceline.models.decoder import HiddenStates
from paceline.models.device import StreamTimer
from paceline.models.heads.block import BlockRunner
from paceline.models.heads.eagle import EagleRunner
from paceline.models.runner import Span
from paceline.speculation import DraftWeights, HiddenRows, SequenceProgress
from paceline.speculation.drafts import DraftPrefill
from paceline.speculation.proposers.eagle.eagle_trees import LEVELS
from paceline.speculation.trees import draft_row

PENDING_ROWS = 16384
"""States of all sequences together."""
SEQUENCE_ROWS = 2048
"""States of one sequence; the newest are kept."""
SMALL_STEP = 16
"""Rows of a step whose states stay in its memory at first: copying a row for every sequence would slow down each step."""
MAX_VIEWS = 32
"""Such steps of a sequence. Their states are then copied together."""


class PendingStates:
    """States by sequence, oldest first. Above the bound, the oldest states of the largest sequence are forgotten."""

    def __init__(self, max_rows: int = PENDING_ROWS, sequence_rows: int = SEQUENCE_ROWS) -> None:
        self._max_rows = max_rows
        self._sequence_rows = sequence_rows
        self._parts: dict[int, deque[HiddenRows]] = {}
        self._rows: dict[int, int] = {}
        self._num_views: dict[int, int] = {}

    @property
    def num_rows(self) -> int:
        return sum(self._rows.values())

    def add(self, sequence_id: int, hidden: HiddenRows, keep: bool) -> None:
        """Add states. `keep` is true if they are not used at once. Large views are then copied, so that they do not keep the
        states of a whole step in memory."""
        hidden = _tail(hidden, self._sequence_rows)
        parts = self._parts.setdefault(sequence_id, deque())
        is_view = keep and _is_small_view(hidden)
        parts.append(_copy(hidden) if keep and not is_view else hidden)
        if is_view:
            self._num_views[sequence_id] = (self._num_views.get(sequence_id, 0) + 1) % MAX_VIEWS
            if self._num_views[sequence_id] == 0:
                _join_views(parts)
        self._rows[sequence_id] = self._rows.get(sequence_id, 0) + hidden.end - hidden.start
        while self._rows[sequence_id] > self._sequence_rows:
            self._forget_oldest(sequence_id)
        while len(self._rows) * self._sequence_rows > self._max_rows and self.num_rows > self._max_rows:
            self._forget_oldest(max(self._rows, key=self._rows.__getitem__))

    def parts(self, sequence_id: int) -> Sequence[HiddenRows]:
        return self._parts.get(sequence_id, ())

    def end(self, sequence_id: int) -> int:
        """Position after the newest state; 0 without states."""
        parts = self._parts.get(sequence_id)
        return parts[-1].end if parts else 0

    def forget_before(self, sequence_id: int, position: int) -> None:
        """Forget parts that end at `position` or earlier."""
        parts = self._parts.get(sequence_id)
        while parts and parts[0].end <= position:
            self._forget_oldest(sequence_id)

    def close(self, sequence_id: int) -> None:
        self._parts.pop(sequence_id, None)
        self._rows.pop(sequence_id, None)
        self._num_views.pop(sequence_id, None)

    def _forget_oldest(self, sequence_id: int) -> None:
        part = self._parts[sequence_id].popleft()
        self._rows[sequence_id] -= part.end - part.start


def _tail(hidden: HiddenRows, rows: int) -> HiddenRows:
    skip = hidden.end - hidden.start - rows
    if skip <= 0:
        return hidden
    if isinstance(hidden.by_layer, HiddenStates):
        return HiddenRows(hidden.start + skip, hidden.by_layer.take(slice(skip, None)), hidden.last)
    inner = {layer: states[skip:] for layer, states in hidden.by_layer.items()}
    return HiddenRows(hidden.start + skip, inner, None if hidden.last is None else hidden.last[skip:])


def _is_small_view(hidden: HiddenRows) -> bool:
    states = hidden.by_layer
    return isinstance(states, HiddenStates) and not states.is_whole and states.states.shape[1] <= SMALL_STEP


def _join_views(parts: deque[HiddenRows]) -> None:
    """Copy the newest views together, as far as they follow each other without a gap."""
    views: list[HiddenStates] = []
    start = parts[-1].end
    while parts and parts[-1].end == start and _is_small_view(parts[-1]):
        part = parts.pop()
        assert isinstance(part.by_layer, HiddenStates)
        views.append(part.by_layer)
        start = part.start
    parts.append(HiddenRows(start, HiddenStates.join(views[::-1]), None))


def _copy(hidden: HiddenRows) -> HiddenRows:
    if isinstance(hidden.by_layer, HiddenStates) and hidden.by_layer.is_whole:
        return hidden
    if isinstance(hidden.by_layer, HiddenStates):
        return HiddenRows(hidden.start, hidden.by_layer.copy(), hidden.last)
    inner = {layer: states.clone() for layer, states in hidden.by_layer.items()}
    return HiddenRows(hidden.start, inner, None if hidden.last is None else hidden.last.clone())


@dataclass(slots=True)
class EagleSequence:
    """The state of one sequence. Tokens without hidden states (prefix hits, speculation off) leave no gap in the head's cache,
    only in the rotary positions: the head does not attend to them."""

    progress: SequenceProgress
    num_cached: int = 0
    next_slot: int = 0
    """Position after the last cached slot; `num_cached` unless slots were skipped."""
    is_shared: bool = True
    """Whether other sequences may use its cache: one set of weights has computed it."""

    @property
    def is_current(self) -> bool:
        """Whether the cache is up to date: the last slot combines the newest token with the state before it."""
        return self.next_slot == len(self.progress.ids) - 1

    @property
    def is_partial(self) -> bool:
        """Whether the head does not attend to most of its tokens."""
        return 2 * self.num_cached < self.next_slot


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Hidden states to compute into the cache of a sequence: rows `rows[i]` of `parts[i]`."""

    sequence: EagleSequence
    parts: tuple[HiddenRows, ...]
    rows: tuple[slice, ...]
    positions: Sequence[int]
    """Positions of the states."""

    @property
    def pieces(self) -> list[tuple[Mapping[int, Tensor], slice]]:
        return [(part.by_layer, rows) for part, rows in zip(self.parts, self.rows, strict=True)]

    @property
    def num_cached(self) -> int:
        """Cached slots of the sequence after it."""
        return self.sequence.num_cached + len(self.positions)

    @property
    def is_last(self) -> bool:
        """Whether the cache is up to date after it."""
        return self.positions[-1] + 2 == len(self.sequence.progress.ids)

    @property
    def is_prefill(self) -> bool:
        """Whether it has more tokens than one round commits."""
        return len(self.positions) > LEVELS + 1

    @property
    def is_processed(self) -> bool:
        """Whether the logits of its next token are modified before one is picked."""
        return draft_row(self.sequence.progress, ()).is_processed


class EagleCache:
    """A cached slot depends on the tokens up to the one after it. The prefix keys of its blocks are therefore those of the
    tokens shifted by one; the first token is part of the salt."""

    def __init__(self, runner: EagleRunner | BlockRunner, max_rows: int, prefix_caching: bool) -> None:
        """`max_rows` is the most committed tokens that one call computes."""
        self.sequences: dict[int, EagleSequence] = {}
        self.pending = PendingStates()
        self.tables = BlockTables(runner.num_blocks, prefix_caching)
        self.weights = DraftWeights(runner.model, self._stop_sharing)
        self._runner = runner
        self._max_rows = max_rows
        self._layers = runner.model.config.state_layers
        self._prefill = DraftPrefill()
        """Draft prefill of the current call."""

    def observe(self, progress: SequenceProgress) -> None:
        self.sequences.setdefault(progress.sequence_id, EagleSequence(progress)).progress = progress
        if progress.hidden is not None:
            self.pending.add(progress.sequence_id, progress.hidden, keep=progress.depth == 0)

    def close(self, sequence_id: int) -> None:
        self.sequences.pop(sequence_id, None)
        self.pending.close(sequence_id)
        self.tables.close(sequence_id)

    def resume(self, sequence_id: int, num_cached: int, fresh: HiddenRows) -> None:
        """Continue a sequence whose first `num_cached` slots the graph executor computed. `fresh` are the states of the
        committed tokens after them."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None or sequence_id not in self.tables:
            return
        sequence.num_cached, sequence.next_slot = num_cached, fresh.start
        self.pending.close(sequence_id)
        self.pending.add(sequence_id, fresh, keep=True)
        self.tables.shrink(sequence_id, num_cached)
        self._publish(sequence)

    def newest_state(self, sequence: EagleSequence) -> HiddenRows | None:
        """A copy of the state before the newest token. None if it was not observed."""
        sequence_id = sequence.progress.sequence_id
        if self.pending.end(sequence_id) != len(sequence.progress.ids) - 1:
            return None
        part = self.pending.parts(sequence_id)[-1]
        return HiddenRows(part.end - 1, {layer: states[-1:].clone() for layer, states in part.by_layer.items()}, None)

    def next_updates(self, sequences: Sequence[EagleSequence]) -> list[CacheUpdate]:
        """Committed tokens to compute, within the budget of rows per call."""
        budget, updates = self._max_rows, []
        for sequence in sequences:
            update = self._next_update(sequence, budget) if budget > 0 else None
            if update is not None:
                updates.append(update)
                budget -= len(update.positions)
        return updates

    def update(self, updates: Sequence[CacheUpdate]) -> tuple[list[EagleSequence], Tensor]:
        """Compute committed tokens. Returns the sequences whose cache is up to date, and the states of their last slots."""
        if not updates:
            return [], torch.empty(0)
        pieces = [piece for update in updates for piece in update.pieces]
        inner = {layer: _joined([states[layer][rows] for states, rows in pieces]) for layer in self._layers}
        last_rows, count = [], 0
        for update in updates:
            count += len(update.positions)
            last_rows.append(count - 1)
        states = self._forward([self.span(update) for update in updates], inner)
        self.advance(updates)
        done = [i for i, update in enumerate(updates) if update.sequence.is_current]
        newest = [states[last_rows[i] : last_rows[i] + 1] for i in done]
        return [updates[i].sequence for i in done], _joined(newest) if done else states[:0]

    def span(self, update: CacheUpdate) -> Span:
        sequence, positions = update.sequence, update.positions
        blocks, ids = self.tables.blocks(sequence.progress.sequence_id), sequence.progress.ids
        return Span(blocks, sequence.num_cached, [ids[p + 1] for p in positions], 0, positions)

    def advance(self, updates: Sequence[CacheUpdate]) -> None:
        """The updates are computed: forget their states and share the blocks that are full now."""
        for update in updates:
            sequence, positions = update.sequence, update.positions
            full = sequence.num_cached // BLOCK_SIZE
            sequence.num_cached += len(positions)
            sequence.next_slot = positions[-1] + 1
            self.pending.forget_before(sequence.progress.sequence_id, sequence.next_slot)
            if sequence.num_cached // BLOCK_SIZE > full:
                self._publish(sequence)

    def take_prefill(self) -> DraftPrefill:
        """The draft prefill since the last call."""
        taken, self._prefill = self._prefill, DraftPrefill()
        return taken

    def _next_update(self, sequence: EagleSequence, budget: int) -> CacheUpdate | None:
        """The next states to compute, at most `budget` rows; None if the newest state is missing or the cache is full."""
        progress = sequence.progress
        if self.pending.end(progress.sequence_id) != len(progress.ids) - 1:
            return None
        is_new = progress.sequence_id not in self.tables
        if is_new:
            # ids[1:]: keys are shifted by one, see the class
            salt = self.weights.salt(f"{progress.ids[0]}/{progress.cache_salt}")
            hit = self.tables.open(progress.sequence_id, progress.ids[1:], salt)
            sequence.num_cached = sequence.next_slot = hit
        parts, slices, positions, taken = [], [], list[int](), 0
        for part in self.pending.parts(progress.sequence_id):
            first = max(sequence.next_slot - part.start, 0)
            last = min(part.end - part.start, first + budget - taken)
            if first < last:
                parts.append(part)
                slices.append(slice(first, last))
                positions.extend(range(part.start + first, part.start + last))
                taken += last - first
        if not taken or not self.tables.grow(progress.sequence_id, sequence.num_cached + taken):
            return None
        if is_new:  # tokens in the cache, and tokens without hidden states
            self._prefill += DraftPrefill(parts[0].start + slices[0].start)
        return CacheUpdate(sequence, tuple(parts), tuple(slices), positions)

    def _forward(self, spans: Sequence[Span], inner: Mapping[int, Tensor]) -> Tensor:
        """A pass over committed tokens. More of them than one round commits are a draft prefill."""
        rows = [len(span.tokens) for span in spans]
        num_prefill = sum(count for count in rows if count > LEVELS + 1)
        if not num_prefill:
            return self._runner.forward(spans, inner)
        timer = StreamTimer(self._runner.model.device)
        states = self._runner.forward(spans, inner)
        self._prefill += DraftPrefill(num_prefill, timer.seconds() * num_prefill / sum(rows))
        return states

    def _stop_sharing(self) -> None:
        """The weights were exchanged: the open sequences continue a cache of the other weights."""
        for sequence in self.sequences.values():
            sequence.is_shared = False

    def _publish(self, sequence: EagleSequence) -> None:
        if sequence.is_shared and sequence.num_cached == sequence.next_slot:
            progress = sequence.progress
            self.tables.publish(progress.sequence_id, progress.ids[1:], sequence.num_cached)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """If the target is inflated, its prompt passes leave wider states than captured steps, which keep the head's columns."""
    width = min(part.shape[1] for part in parts)
    return parts[0] if len(parts) == 1 else torch.cat([part[:, :width] for part in parts])
