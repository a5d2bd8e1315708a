"""Who is served next: takers in turn, a piece at a time, so that one who wants much does not keep the others waiting."""

from collections import deque
from typing import NamedTuple, TypeAlias

from paceline.runtime.transfer.messages import Want
from paceline.runtime.wire.transport import Peer

Taker: TypeAlias = Peer | str
"""By ZeroMQ, or by a window."""

MAX_WANTS = 64
"""A taker's, open at once."""
MAX_WAITING = 1 << 16
"""Of all takers together."""


class Turn(NamedTuple):
    taker: Taker
    want: Want


class Turns:
    """Wants whose part is ready, in turn by taker; and those that wait for theirs, by part."""

    def __init__(self) -> None:
        self._ready: dict[Taker, deque[Want]] = {}
        """In the order of turns: who was served goes to the end."""
        self._waiting: dict[bytes, dict[int, list[Turn]]] = {}
        self._counts: dict[Taker, int] = {}
        self._num_waiting = 0

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def has_room(self, taker: Taker) -> bool:
        return self._counts.get(taker, 0) < MAX_WANTS and self._num_waiting < MAX_WAITING

    def add(self, turn: Turn, is_ready: bool) -> None:
        self._counts[turn.taker] = self._counts.get(turn.taker, 0) + 1
        if is_ready:
            self._ready.setdefault(turn.taker, deque()).append(turn.want)
        else:
            self._waiting.setdefault(turn.want.id, {}).setdefault(turn.want.index, []).append(turn)
            self._num_waiting += 1

    def ready(self, id: bytes, index: int) -> None:
        """Whoever waited for this part gets in line."""
        for taker, want in self._stop_waiting(id, index):
            self._ready.setdefault(taker, deque()).append(want)

    def next(self) -> Turn | None:
        taker = next(iter(self._ready), None)
        if taker is None:
            return None
        wants = self._ready.pop(taker)
        want = wants.popleft()
        if wants:
            self._ready[taker] = wants
        self._forget(taker, 1)
        return Turn(taker, want)

    def waited_for(self, id: bytes) -> list[int]:
        """The parts of a parcel that somebody waits for."""
        return list(self._waiting.get(id, ()))

    def give_up(self, id: bytes, index: int) -> set[Taker]:
        """The part will not come. Those who waited for it."""
        turns = self._stop_waiting(id, index)
        for taker, _ in turns:
            self._forget(taker, 1)
        return {taker for taker, _ in turns}

    def withdraw(self, id: bytes) -> set[Taker]:
        """Nothing of this parcel is given any more. Those who still wanted some."""
        hit: set[Taker] = set()
        for index in self.waited_for(id):
            hit |= self.give_up(id, index)
        for taker, wants in list(self._ready.items()):
            kept = deque(want for want in wants if want.id != id)
            if len(kept) < len(wants):
                hit.add(taker)
                self._forget(taker, len(wants) - len(kept))
                self._ready[taker] = kept
                if not kept:
                    del self._ready[taker]
        return hit

    def waiting(self) -> set[Taker]:
        return {taker for parts in self._waiting.values() for turns in parts.values() for taker, _ in turns}

    def drop(self, taker: Taker) -> None:
        """The taker is gone."""
        self._ready.pop(taker, None)
        for id, parts in list(self._waiting.items()):
            for index, turns in list(parts.items()):
                kept = [turn for turn in turns if turn.taker != taker]
                if len(kept) < len(turns):
                    self._stop_waiting(id, index)
                    for turn in kept:
                        self._waiting.setdefault(id, {}).setdefault(index, []).append(turn)
                    self._num_waiting += len(kept)
        self._counts.pop(taker, None)

    def _stop_waiting(self, id: bytes, index: int) -> list[Turn]:
        parts = self._waiting.get(id, {})
        turns = parts.pop(index, [])
        if not parts:
            self._waiting.pop(id, None)
        self._num_waiting -= len(turns)
        return turns

    def _forget(self, taker: Taker, count: int) -> None:
        left = self._counts[taker] - count
        if left:
            self._counts[taker] = left
        else:
            del self._counts[taker]
