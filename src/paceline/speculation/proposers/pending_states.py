"""Hidden states that a proposer observed and has not computed yet, in bounded memory."""

from collections import deque
from collections.abc import Sequence

from paceline.models.row_states import HiddenStates
from paceline.speculation.proposer import HiddenRows

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
