"""Time of the host between two passes: commit, cache moves, the decision on the next drafts, delivery of tokens.

The device waits for it. The host works longer after a step with drafts, which commits more tokens and is followed by a decision
on the next drafts. How long it worked after a step is known when the next step begins.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

from paceline.speculation.depth.policy import StepObservation

WINDOW = 32
"""Steps remembered of each kind; their median counts, so that single pauses do not."""
LEAST = 2
"""Number of steps of a kind before its time is used. It is low because few steps are plain while drafts clearly pay."""


@dataclass(frozen=True, slots=True)
class _Kind:
    scale: int
    """Bits of the batch: a power of two."""
    has_drafts: bool


class HostTime:
    """Learns the host time of steps whose batch is ragged. Steps of a padded batch overlap with the host."""

    def __init__(self) -> None:
        self._seen: dict[_Kind, deque[float]] = {}
        self._last: _Kind | None = None
        """Kind of the previous step. None if the previous step is not measured."""

    def observe(self, step: StepObservation) -> None:
        if step.host_seconds is not None and self._last is not None and not step.prefill_rows:
            self._seen.setdefault(self._last, deque(maxlen=WINDOW)).append(step.host_seconds)
        is_usual = step.batch and step.slots is None and step.is_timed and not step.prefill_rows
        self._last = _Kind(step.batch.bit_length(), bool(step.drafting)) if is_usual else None

    def plain(self, batch: int) -> float:
        """Seconds after a step without drafts; 0 while not known."""
        return self._median(_Kind(batch.bit_length(), False)) or 0.0

    def drafting(self, batch: int) -> float:
        """Seconds after a step with drafts; as `plain` while not known."""
        found = self._median(_Kind(batch.bit_length(), True)) if self.plain(batch) else None
        return self.plain(batch) if found is None else found

    def _median(self, kind: _Kind) -> float | None:
        seen = self._seen.get(kind, ())
        return median(seen) if len(seen) >= LEAST else None
