"""Clocks are passed in, so that every decision can be tested, replayed and simulated."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a clock that never goes backwards."""
        ...


class WallClock:
    def now(self) -> float:
        return time.perf_counter()


class VirtualClock:
    """A clock that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("a clock cannot go backwards: advance by 0 seconds or more")
        self._now += seconds

    def advance_to(self, time: float) -> None:
        """Moves on to `time`, unless it is past."""
        elapsed = time - self._now
        if elapsed > 0.0:
            self._now += elapsed
