"""Segments: the steps of a worker between two events."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import ceil, floor, sqrt

from paceline.planning.simulation.workers.rounds import SimulatedRound

_EPSILON = 1e-9


class DecodeSegment:
    """Steps of one shape without prompts. Contexts grow, so every step takes `slope` longer than the one before:

    D(n) = n first + slope n (n - 1) / 2
    """

    __slots__ = ("_first", "_slope", "end", "start", "step", "steps")
    prompt_rows = 0

    def __init__(self, start: float, steps: int, step: SimulatedRound, first: float, slope: float) -> None:
        self.start, self.steps, self.step = start, steps, step
        self._first, self._slope = first, slope
        self.end = start + (steps * first + slope * steps * (steps - 1) / 2.0)

    def shorten(self, now: float) -> bool:
        """End at the first boundary at or after `now`, after at least one step. Whether the end has changed."""
        return self._set_steps(min(max(1, ceil(self._steps_at(now) - _EPSILON)), self.steps))

    def cut(self, now: float) -> None:
        """Keep only the steps that have ended by `now`, which is before the end."""
        self._set_steps(min(floor(self._steps_at(now)), self.steps - 1))

    def _set_steps(self, steps: int) -> bool:
        if steps == self.steps:
            return False
        self.steps = steps
        self.end = self.start + (steps * self._first + self._slope * steps * (steps - 1) / 2.0)
        return True

    def _steps_at(self, time: float) -> float:
        elapsed, square = max(0.0, time - self.start), self._slope / 2.0
        linear = self._first - square
        if square <= 0.0:
            return elapsed / linear
        return (sqrt(linear * linear + 4.0 * square * elapsed) - linear) / (2.0 * square)


class PromptSegment:
    """Steps with prompt rows, each with a time and a number of rows of its own."""

    __slots__ = ("_ends", "_rows", "end", "prompt_rows", "start", "step", "steps")

    def __init__(self, start: float, step: SimulatedRound, ends: Sequence[float], rows: Sequence[int]) -> None:
        """`ends` are the times at which the steps end. `rows` are the prompt rows up to the end of each step."""
        self.start, self.step = start, step
        self._ends, self._rows = ends, rows
        self.steps, self.end = len(ends), ends[-1]
        self.prompt_rows = rows[-1]
        """Prompt rows of all steps."""

    def shorten(self, now: float) -> bool:
        """End at the first boundary at or after `now`. Whether the end has changed."""
        return self._set_steps(min(bisect_left(self._ends, now - _EPSILON) + 1, self.steps))

    def cut(self, now: float) -> None:
        """Keep only the steps that have ended by `now`, which is before the end."""
        self._set_steps(min(bisect_right(self._ends, now), self.steps - 1))

    def _set_steps(self, steps: int) -> bool:
        if steps == self.steps:
            return False
        self.steps, self.end = steps, self._ends[steps - 1] if steps else self.start
        self.prompt_rows = self._rows[steps - 1] if steps else 0
        return True


SimulatedSteps = DecodeSegment | PromptSegment
