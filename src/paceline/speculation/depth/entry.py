"""What it costs to begin to draft. A draft that sat idle first reads what was written meanwhile, whole prompts of it, and the
steps that wait for that are slow: where drafting pays little, beginning is a loss that it may never make up for.
"""

from paceline.speculation.depth.policy import StepObservation

HORIZON = 256
"""Steps within which drafting has to make up for its beginning."""
_IDLE = 8
"""Steps without drafts before a draft is thought to have sat idle."""
_WEIGHT = 0.25


class Entry:
    """Learns what a beginning took beyond its usual steps, for each sequence that drafts."""

    def __init__(self) -> None:
        self._price: float | None = None
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
                drafting = sum(drafting.seconds for drafting in step.drafting)
                self._seconds += max(0.0, step.verify_seconds + step.network_seconds + drafting - usual)
                self._sequences = max(self._sequences, sum(seen.asked > 0 for seen in step.rounds))
            if not step.is_timed:
                return
        self._settle()
        self._idle = 0

    def seconds(self, sequences: int) -> float:
        """Of beginning to draft for so many."""
        return (self._price or 0.0) * sequences

    def _settle(self) -> None:
        if self._sequences:
            price = self._seconds / self._sequences
            self._price = price if self._price is None else self._price + _WEIGHT * (price - self._price)
        self._seconds, self._sequences = 0.0, 0
