"""How many outcomes a draft worker prepares for each sequence: as many as save most passes on demand. Pure.

A pass over r rows takes t(r) = t0 + t1 r, fitted to recent passes. With S sequences and n branches each, the pause between an
answer and the target's next request has room for m = PAUSE_SHARE pause / t(n S) passes. Every token of a draft of K tokens that
is ready then saves a pass that the target would wait for. With p_i the probability of outcome i, n maximizes

    p_1 min(K, m - 1) + sum_{1 < i <= n} p_i min(K, m)

where the first outcome is full acceptance: the token that follows it takes a pass of its own. On a GPU rows cost little, so
that n is large; on cores of a host a row costs a good part of a pass, and many incomplete drafts may be better than few
complete ones. With several sequences all drafts have to be complete: the target waits for the last of them.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW = 256.0
"""Passes in the decaying sums."""
MIN_PASSES = 8.0
"""Passes in the sums before they say anything."""
PAUSE_SHARE = 0.85
"""Share of a pause that passes may fill: the worker schedules and answers between them, and times vary."""
NUM_PAUSES = 16
"""Pauses of which the median counts: a target without requests makes a long one."""


class BranchBudget:
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

    @property
    def is_known(self) -> bool:
        """Whether `pass_seconds` rests on enough passes."""
        return self._count >= MIN_PASSES

    def pass_seconds(self, rows: int) -> float:
        """Expected time of a pass over `rows` rows."""
        mean_rows, mean_seconds = self._rows / self._count, self._seconds / self._count
        variance = self._squares / self._count - mean_rows * mean_rows
        covariance = self._products / self._count - mean_rows * mean_seconds
        # Without passes of different sizes, or with noise alone, rows count as free until larger passes show their cost
        slope = max(0.0, covariance / variance) if variance > 0.25 else 0.0
        return max(0.0, mean_seconds + slope * (rows - mean_rows))

    def num_branches(self, depth: int, sequences: int, probabilities: Sequence[float]) -> int:
        """Number of branches for each sequence. `probabilities` are those of their outcomes: first the draft's own
        continuation, then the alternatives, most probable first. All branches are drafted until enough was observed."""
        if not self.is_known or not self._pauses:
            return len(probabilities)
        time, own, others = PAUSE_SHARE * median(self._pauses), probabilities[0], 0.0
        best, best_saved = 1, 0.0
        for count, probability in enumerate(probabilities, start=1):
            others += probability if count > 1 else 0.0
            seconds = self.pass_seconds(count * sequences)
            passes = 0.0 if seconds > time else time / max(1e-9, seconds)
            if sequences > 1 and passes < depth + 1:
                break  # the target waits for the last of its sequences: a part of a draft saves little
            saved = own * min(depth, max(0.0, passes - 1.0)) + others * min(depth, passes)
            if saved > best_saved:
                best, best_saved = count, saved
        return best
