"""What it costs a sequence to begin to draft. A draft first reads what was written without it, a whole prompt of it: where
drafting gains little, or the sequence soon ends, that is a loss that is never made up for.
"""

from collections.abc import Sequence

from paceline.speculation.depth.policy import Candidate, StepObservation, method_of

HORIZON = 256
"""Tokens within which drafting has to make up for its beginning, where a sequence has as many left."""
_IDLE = 8
"""Steps without a draft after which a sequence's draft has fallen behind."""
_KEPT = 4096
"""Steps for which a sequence that had drafts is remembered."""
_WINDOW = 4096.0
"""Tokens read that the rate remembers."""
_SURPRISE = 4.0
"""Times the usual, more than which is not believed of a reading; less than its inverse shows that the usual was none."""


class Lag:
    """Learns how far drafts are behind and what reading on takes."""

    def __init__(self) -> None:
        self._step = 0
        self._last: dict[int, int] = {}  # when a sequence had drafts
        self._rates: dict[str, tuple[float, float]] = {}  # by method: seconds, tokens

    def observe(self, step: StepObservation) -> None:
        self._step += 1
        for seen in step.rounds:
            if seen.drafted:
                self._last[seen.sequence_id] = self._step
        if self._step % _KEPT == 0:
            self._last = {i: last for i, last in self._last.items() if self._step - last < _KEPT}
        for drafting in step.drafting:
            if drafting.read_tokens:
                self._learn(drafting.method, drafting.read_tokens, drafting.read_seconds)

    def _learn(self, method: str, tokens: int, seconds: float) -> None:
        """A pause that befalls one reading must not keep drafting off for long, nor may a first one that compiled."""
        known_seconds, known_tokens = self._rates.get(method, (0.0, 0.0))
        kept = max(0.0, 1.0 - tokens / _WINDOW)
        if known_tokens:
            usual = known_seconds / known_tokens * tokens
            kept = 0.0 if seconds < usual / _SURPRISE else kept
            seconds = min(seconds, usual * _SURPRISE)
        self._rates[method] = known_seconds * kept + seconds, known_tokens * kept + tokens

    def late(self, batch: Sequence[Candidate], depths: Sequence[int], saved: float) -> set[int]:
        """Places of those who were to draft, and to whom that costs more to begin with than it saves them, which is `saved` for
        each plain step that they have left."""
        if not self._rates:
            return set()
        recent = self._step - _IDLE
        behind = [
            i
            for i, (c, depth) in enumerate(zip(batch, depths, strict=True))
            if depth and self._last.get(c.sequence_id, recent - 1) < recent
        ]
        return {i for i in behind if self.reading(batch[i]) > saved * horizon(batch[i])}

    def reading(self, candidate: Candidate) -> float:
        """What drafting costs this sequence to begin with; 0 if it drafts already, or nothing is known."""
        if not self._rates:
            return 0.0
        seconds, tokens = self._rates.get(method_of(candidate.category), (0.0, 1.0))
        missed = self._step - self._last[candidate.sequence_id] if candidate.sequence_id in self._last else None
        if missed is not None and missed <= _IDLE:
            return 0.0
        behind = candidate.num_tokens if missed is None else min(missed, candidate.num_tokens)
        return behind * seconds / tokens


def horizon(candidate: Candidate) -> int:
    return HORIZON if candidate.remaining is None else max(1, min(candidate.remaining, HORIZON))
