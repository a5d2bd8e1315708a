"""How long the current step should take, from the steps before it."""

from collections import deque

FACTOR = 4.0
"""Longest step, as a multiple of the slowest recent one of its size."""
NUM_RECENT = 32
NUM_FIRST = 2
"""First steps of a size, which may compile kernels or capture graphs: they are not measured."""


class StepTimePrediction:
    """One thread calls `begin` and `end`; any thread reads `step_seconds`. A size is a power of two of scheduled tokens."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        """Longest time that the current step should take. None if no step of its size was measured yet."""
        self._recent: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._size = 0
        self._began: float | None = None

    def begin(self, num_tokens: int, now: float) -> None:
        """A step over `num_tokens` scheduled tokens begins."""
        self._size, self._began = num_tokens.bit_length(), now
        recent = self._recent.get(self._size)
        self.step_seconds = FACTOR * max(recent) if recent else None

    def end(self, now: float) -> None:
        """The step is over."""
        if self._began is None:
            return
        self._counts[self._size] = count = self._counts.get(self._size, 0) + 1
        if count > NUM_FIRST:
            self._recent.setdefault(self._size, deque(maxlen=NUM_RECENT)).append(now - self._began)
        self._began = None
