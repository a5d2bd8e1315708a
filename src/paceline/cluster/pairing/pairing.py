"""Which draft worker a target opens its next sequence at: the one that answers soonest, and that one while it stays good."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

SAMPLES = 16


class RoundTrip:
    """How long a worker takes to answer, at best and mostly: the least and the median of the last few samples.

    A sample ends when somebody looks, and a target does not look while it verifies. So only those count that were waited for,
    unless there are none: then the others say at least that it takes no longer.
    """

    def __init__(self) -> None:
        self._watched: deque[float] = deque(maxlen=SAMPLES)
        self._others: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, seconds: float, watched: bool) -> None:
        (self._watched if watched else self._others).append(seconds)

    @property
    def seconds(self) -> float | None:
        """At best: how far away it is."""
        return min(self._watched or self._others, default=None)

    @property
    def seen(self) -> float | None:
        """The least that was really seen: None while nobody has waited for an answer."""
        return min(self._watched, default=None)

    @property
    def usual(self) -> float | None:
        """Mostly: what waiting for an answer costs, be it that the worker is far away or that it is kept from its work."""
        samples = self._watched or self._others
        return median_high(samples) if samples else None


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft worker as a target sees it."""

    name: str
    round_trip: float | None
    """Seconds; None before the first answer."""
    queue: float
    """Seconds of drafting that wait there already."""
    is_usable: bool

    @property
    def cost(self) -> float:
        return (self.round_trip or 0.0) + self.queue


class Pairing:
    """Sticks to a worker until another has been better by a margin, and for a while: moving costs a prefill."""

    def __init__(self, margin: float = 0.25, least: float = 0.0005, hold: float = 2.0) -> None:
        """Another worker must be cheaper by the share `margin` and by `least` seconds, throughout `hold` seconds."""
        self._margin, self._least, self._hold = margin, least, hold
        self._current: str | None = None
        self._rival: str | None = None
        self._since = 0.0

    def choose(self, views: Sequence[DraftView], now: float) -> str | None:
        """Where to open now; None when there is no usable worker."""
        usable = {view.name: view for view in views if view.is_usable}
        if not usable:
            self._current = self._rival = None
            return None
        best = min(usable.values(), key=lambda view: (view.cost, view.name))
        current = usable.get(self._current) if self._current is not None else None
        if current is None:
            self._current, self._rival = best.name, None
        elif best.cost > current.cost * (1.0 - self._margin) or current.cost - best.cost < self._least:
            self._rival = None
        elif self._rival != best.name:
            self._rival, self._since = best.name, now
        elif now - self._since >= self._hold:
            self._current, self._rival = best.name, None
        return self._current
