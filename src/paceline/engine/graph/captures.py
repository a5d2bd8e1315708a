"""Captures of CUDA graphs that wait for an idle moment. A step that needs one earlier captures it itself, uses another graph,
or runs eagerly.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from paceline.core.machine import log_phase
from paceline.engine import StepHook

SLICE_SECONDS = 0.05
"""Time of one call after which no further capture begins: a new request waits for the call."""

BUSY_SHARE = 0.1
"""Share of the time that captures may take while the engine has requests."""

Capture = Callable[[], object]


class IdleCaptures(StepHook):
    """Runs captures in the order in which they were added, while the engine has no requests."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._waiting: deque[Capture] = deque()
        self._num_done, self._seconds = 0, 0.0
        self._next = 0.0

    @property
    def is_allowed(self) -> bool:
        """Whether a step may capture a graph that it could do without."""
        return self._now() >= self._next

    def count_busy(self, seconds: float) -> None:
        """A step captured graphs, which took this time."""
        self._next = self._now() + seconds * (1.0 - BUSY_SHARE) / BUSY_SHARE

    def add(self, captures: Iterable[Capture]) -> None:
        self._waiting.extend(captures)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_idle_work(self) -> bool:
        return bool(self._waiting)

    def use_idle_time(self) -> None:
        if not self._waiting:
            return
        began = now = self._now()
        while self._waiting and now - began < SLICE_SECONDS:
            self._waiting.popleft()()
            self._num_done += 1
            now = self._now()
        self._seconds += now - began
        if not self._waiting:
            log_phase("capture graphs in idle moments", self._seconds, f"{self._num_done} graphs")
            self._num_done, self._seconds = 0, 0.0
