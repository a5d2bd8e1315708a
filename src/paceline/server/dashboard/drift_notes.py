"""When acceptance was seen to change, for whoever looks at the dashboard."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from paceline.engine.stats.snapshot import TrafficReport

KEPT = 20


@dataclass(frozen=True, slots=True)
class DriftNote:
    """The acceptance of first drafts of a class of traffic changed, and depth is learned anew."""

    time: float
    """Seconds since 1970."""
    category: str
    method: str
    before: float
    after: float


class DriftNotes:
    """Engines count changes; the moment is when the count was first seen higher."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] | None = None
        self._notes: deque[DriftNote] = deque(maxlen=KEPT)

    @property
    def notes(self) -> tuple[DriftNote, ...]:
        """Oldest first."""
        return tuple(self._notes)

    def look(self, traffic: Iterable[TrafficReport], now: float) -> None:
        """What happened before the first look has no time, and is left out."""
        counts = {(one.category, one.method): one for one in traffic}
        if self._counts is not None:
            for key, one in counts.items():
                if one.drift is not None and one.drifts > self._counts.get(key, 0):
                    self._notes.append(DriftNote(now, one.category, one.method, *one.drift))
        self._counts = (self._counts or {}) | {key: one.drifts for key, one in counts.items()}
