"""How many outcomes a draft worker prepares for each sequence: as many as it can draft while the target verifies. Pure.

A pass over r rows takes t(r) = t0 + t1 r, fitted to recent passes. A draft of K tokens that is prepared ahead needs K + 1
passes: the token after full acceptance, and K tokens after it. With S sequences and n branches each, all are ready in time if

    (K + 1) t(n S)  <=  PAUSE_SHARE pause

where the pause is the time between an answer and the target's next request. On a GPU rows cost little, so that n is large; on
cores of a host a row costs a good part of a pass.
"""

from collections import deque
from statistics import median

WINDOW = 256.0
"""Passes in the decaying sums."""
MIN_PASSES = 8.0
"""Passes in the sums before they say anything."""
PAUSE_SHARE = 0.85
"""Share of a pause that passes may fill: the worker schedules and answers between them, and times vary."""
NUM_PAUSES = 16
"""Pauses of which the median counts: a target without requests makes a long one."""


class AheadBudget:
    """The decision for all targets of one worker."""

    def __init__(self) -> None:
        self._count = self._rows = self._squares = self._seconds = self._products = 0.0
        self._pauses: deque[float] = deque(maxlen=NUM_PAUSES)

    def observe_pass(self, rows: int, seconds: float) -> None:
        keep = 1.0 - 1.0 / WINDOW
        self._count = self._count * keep + 1.0
        self._rows = self._rows * keep + rows
        self._squares = self._squares * keep + rows * rows
        self._seconds = self._seconds * keep + seconds
        self._products = self._products * keep + rows * seconds

    def observe_pause(self, seconds: float) -> None:
        """Time between an answer and the next request of its target."""
        self._pauses.append(seconds)

    def pass_seconds(self, rows: int) -> float:
        """Expected time of a pass over so many rows."""
        mean_rows, mean_seconds = self._rows / self._count, self._seconds / self._count
        variance = self._squares / self._count - mean_rows * mean_rows
        covariance = self._products / self._count - mean_rows * mean_seconds
        # Without passes of different sizes, or with noise alone, rows count as free until larger passes show their cost
        slope = max(0.0, covariance / variance) if variance > 0.25 else 0.0
        return max(0.0, mean_seconds + slope * (rows - mean_rows))

    def num_branches(self, depth: int, sequences: int, most: int) -> int:
        """Branches for each sequence, from 1 (the draft's own continuation) to `most`, which is also the answer before enough
        was observed."""
        if self._count < MIN_PASSES or not self._pauses:
            return most
        time, low, high = PAUSE_SHARE * median(self._pauses), 1, max(1, most)
        while low < high:  # the largest number that fits
            middle = (low + high + 1) // 2
            if (depth + 1) * self.pass_seconds(middle * sequences) <= time:
                low = middle
            else:
                high = middle - 1
        return low
