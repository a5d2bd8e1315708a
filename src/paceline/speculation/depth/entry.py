"""What it costs a batch to begin to draft, besides what drafts must read (`lag.py`): the steps in which that is done may be
taken another, slower way.
"""

from collections import deque
from statistics import median_low

from paceline.speculation.depth.policy import StepObservation

_IDLE = 8
"""Steps without drafts before a draft is thought to have sat idle."""
_BEGINNINGS = 3
"""The last so many are remembered. Their median counts: a pause that befell one of them would keep drafting off for long."""


class Entry:
    """Learns what a beginning took beyond its usual steps, for each sequence of the batch: all of it goes the slower way,
    whoever drafts."""

    def __init__(self) -> None:
        self._prices: deque[float] = deque(maxlen=_BEGINNINGS)
        self._idle = _IDLE  # steps without drafts; after a beginning, until it is over, still as many
        self._seconds, self._sequences = 0.0, 0

    def observe(self, step: StepObservation, usual: float | None) -> None:
        """`usual`: the seconds of such a step once drafts are up to date, if known."""
        if not step.drafting:
            self._settle()
            self._idle += 1
            return
        if self._idle >= _IDLE:
            if usual is not None and not step.prefill_rows:
                read = sum(drafting.read_seconds for drafting in step.drafting)
                self._seconds += max(0.0, step.seconds - read - usual)
                self._sequences = max(self._sequences, step.batch)
            # HAZARD: not every step on the host is a beginning. With a sequence that cannot run ahead all of them are there
            if not step.is_timed and any(seen.asked and not seen.drafted for seen in step.rounds):
                return
        self._settle()
        self._idle = 0

    def seconds(self, batch: int) -> float:
        """Of beginning to draft in a batch of so many."""
        return median_low(self._prices) * batch if self._prices else 0.0

    def _settle(self) -> None:
        if self._sequences:
            self._prices.append(self._seconds / self._sequences)
        self._seconds, self._sequences = 0.0, 0
