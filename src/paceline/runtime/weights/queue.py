"""Which part of a model is brought next, and by whom: sources come for work as they are free."""

import threading
from dataclasses import dataclass, field

from paceline.core.clock import Clock, WallClock

OVERDUE_SECONDS = 2.0
"""A part that has been under way for so long, and three times as long as others took, is brought by a second source too."""
LOOK_SECONDS = 0.2


@dataclass(slots=True, eq=False)
class Errand:
    """A part that a source is to bring."""

    part: int
    source: str
    began: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Somebody else has brought it, or nobody wants it any more."""


class PartQueue:
    """Parts in order, each brought once. Sources call from threads of their own."""

    def __init__(self, parts: list[int], clock: Clock | None = None) -> None:
        self._waiting = sorted(parts)
        self._under_way: list[Errand] = []
        self._missing = set(parts)
        self._clock = clock or WallClock()
        self._mean = 0.0
        self._is_over = False
        self._changed = threading.Condition()

    def take(self, source: str) -> Errand | None:
        """The next part to bring; waits while others may yet fail with theirs. None: there is nothing left to do."""
        with self._changed:
            while True:
                if self._is_over or not self._missing:
                    return None
                part = self._next(source)
                if part is not None:
                    errand = Errand(part, source, self._clock.now())
                    self._under_way.append(errand)
                    return errand
                self._changed.wait(LOOK_SECONDS)

    def brought(self, errand: Errand) -> bool:
        """Whether it is the first to bring this part."""
        with self._changed:
            self._under_way.remove(errand)
            if errand.part not in self._missing:
                return False
            self._missing.discard(errand.part)
            took = self._clock.now() - errand.began
            self._mean = took if not self._mean else 0.7 * self._mean + 0.3 * took
            for other in self._under_way:
                if other.part == errand.part:
                    other.cancelled.set()
            self._changed.notify_all()
            return True

    def failed(self, errand: Errand) -> None:
        """Somebody else has to bring it."""
        with self._changed:
            self._under_way.remove(errand)
            if errand.part in self._missing and not any(other.part == errand.part for other in self._under_way):
                self._waiting = sorted([*self._waiting, errand.part])
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is wanted."""
        with self._changed:
            self._is_over = True
            for errand in self._under_way:
                errand.cancelled.set()
            self._changed.notify_all()

    def _next(self, source: str) -> int | None:
        if self._waiting:
            return self._waiting.pop(0)
        late = self._clock.now() - max(OVERDUE_SECONDS, 3.0 * self._mean)
        carriers: dict[int, list[Errand]] = {}
        for errand in self._under_way:
            carriers.setdefault(errand.part, []).append(errand)
        overdue = (
            part for part, (first, *others) in sorted(carriers.items()) if not others and first.began < late
        )  # fmt: skip
        return next((part for part in overdue if carriers[part][0].source != source), None)
