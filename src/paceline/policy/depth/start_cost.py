"""What it costs to start drafting: the draft prefill of a sequence, and the switch of a batch from plain steps to drafting.

A draft with its own cache first computes all tokens that were committed without it, often a whole prompt. If drafting gains
little or the sequence ends soon, that cost is never recovered.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median_low

from paceline.policy.depth.observation import DepthCandidate, StepObservation
from paceline.policy.step import DRAFT_PREFILL_SLOWDOWN

HORIZON = 256
"""Tokens within which drafting has to recover its start cost, for a sequence that has as many left."""
_IDLE_STEPS = 8
"""Steps without drafts after which a draft's cache counts as behind."""
_KEPT_STEPS = 4096
"""Steps for which a sequence that drafted is remembered."""
_WINDOW = 4096.0
"""Tokens of draft prefill in the measured rate."""
_CALIBRATED_TOKENS = 1024.0
"""Tokens as which the measurement of a warm-up counts."""
_MAX_RATIO = 4.0
"""Measured over usual time of a draft prefill: a larger ratio is clipped. Below its inverse the old rate is discarded."""
_SWITCHES = 3
"""Switches remembered. The median counts, so that a single pause does not keep drafting off."""


def horizon(candidate: DepthCandidate) -> int:
    """Tokens within which drafting has to recover its start cost."""
    return HORIZON if candidate.remaining is None else max(1, min(candidate.remaining, HORIZON))


class DraftPrefillCost:
    """Learns the time of draft prefill per token, and which sequences need one."""

    def __init__(self) -> None:
        self._step = 0
        self._last_drafted: dict[int, int] = {}  # sequence -> step
        self._rates: dict[str, tuple[float, float]] = {}  # method -> seconds, tokens
        self._calibrated: dict[str, float] = {}

    def calibrate(self, method: str, seconds: float) -> None:
        """Start from the time per token that a warm-up has measured, of several prompts at once."""
        self._rates[method] = DRAFT_PREFILL_SLOWDOWN * seconds * _CALIBRATED_TOKENS, _CALIBRATED_TOKENS
        self._calibrated[method] = seconds

    def prompt_seconds(self, methods: Iterable[str]) -> float:
        """Time per token that draft prefill adds to the target's passes over prompts, which run at the same time. It is the
        highest time of these methods, 0 if a warm-up measured none."""
        return max([self._calibrated.get(method, 0.0) for method in methods], default=0.0)

    def observe(self, step: StepObservation) -> None:
        self._step += 1
        for seen in step.rounds:
            if seen.drafted:
                self._last_drafted[seen.sequence_id] = self._step
        if self._step % _KEPT_STEPS == 0:
            recent = self._step - _KEPT_STEPS
            self._last_drafted = {i: last for i, last in self._last_drafted.items() if last > recent}
        for drafting in step.drafting:
            if drafting.prefill_tokens:
                self._learn(drafting.method, drafting.prefill_tokens, drafting.prefill_seconds)

    def _learn(self, method: str, tokens: int, seconds: float) -> None:
        """Neither one long pause nor a first prefill that compiled may keep drafting off for long."""
        known_seconds, known_tokens = self._rates.get(method, (0.0, 0.0))
        kept = max(0.0, 1.0 - tokens / _WINDOW)
        if known_tokens:
            usual = known_seconds / known_tokens * tokens
            kept = 0.0 if seconds < usual / _MAX_RATIO else kept
            seconds = min(seconds, usual * _MAX_RATIO)
        self._rates[method] = known_seconds * kept + seconds, known_tokens * kept + tokens

    def unprofitable(self, batch: Sequence[DepthCandidate], depths: Sequence[int], saved: float) -> set[int]:
        """Indices of sequences whose draft prefill costs more than drafting saves them: `saved` seconds for each token that
        they have left, up to the horizon. Only sequences with a depth are considered."""
        return {i for i in self.behind(batch, depths) if self.seconds(batch[i]) > saved * horizon(batch[i])}

    def behind(self, batch: Sequence[DepthCandidate], depths: Sequence[int]) -> list[int]:
        """Indices of sequences with a depth that need a draft prefill."""
        if not self._rates:
            return []
        recent = self._step - _IDLE_STEPS
        return [
            i
            for i, (c, depth) in enumerate(zip(batch, depths, strict=True))
            if depth and self._last_drafted.get(c.sequence_id, recent - 1) < recent
        ]

    def seconds(self, candidate: DepthCandidate) -> float:
        """Time of the draft prefill that this sequence needs; 0 if its draft is up to date, or nothing is known."""
        if not self._rates:
            return 0.0
        seconds, tokens = self._rates.get(candidate.traffic.method, (0.0, 1.0))
        last = self._last_drafted.get(candidate.sequence_id)
        missed = None if last is None else self._step - last
        if missed is not None and missed <= _IDLE_STEPS:
            return 0.0
        behind = candidate.num_tokens if missed is None else min(missed, candidate.num_tokens)
        return behind * seconds / tokens


class SwitchOnCost:
    """Learns the time, in addition to draft prefill, that a batch loses when it changes from plain steps to drafting.

    The steps of a switch may run on a slower path, and the whole batch takes it. The cost is kept by scale (power of two) of
    the batch. A scale without a switch uses the nearest: in proportion for a smaller batch, and as it is for a larger one,
    because a part of the cost does not grow with the batch.
    """

    def __init__(self) -> None:
        self._costs: dict[int, deque[float]] = {}
        self._idle_steps = _IDLE_STEPS  # steps without drafts; not reset until a switch is complete
        self._seconds, self._batch = 0.0, 0

    def observe(self, step: StepObservation, expected: float | None) -> None:
        """`expected` is the time of such a step once drafts are up to date, if it is known."""
        if not step.drafting:
            self._end_switch()
            self._idle_steps += 1
            return
        if self._idle_steps >= _IDLE_STEPS:
            if expected is not None and not step.prefill_rows:
                prefill = sum(drafting.prefill_seconds for drafting in step.drafting)
                self._seconds += max(0.0, step.seconds - prefill - expected)
                self._batch = max(self._batch, step.batch)
            # HAZARD: an untimed step is not always part of a switch. All steps of a batch that no graph can run are untimed.
            if not step.is_timed and any(seen.requested and not seen.drafted for seen in step.rounds):
                return
        self._end_switch()
        self._idle_steps = 0

    def seconds(self, batch: int) -> float:
        """Time that a switch of `batch` sequences to drafting costs."""
        if not self._costs:
            return 0.0
        scale = batch.bit_length()
        nearest = min(self._costs, key=lambda seen: (abs(seen - scale), seen))
        return median_low(self._costs[nearest]) * min(1.0, 2.0 ** (scale - nearest))

    def _end_switch(self) -> None:
        if self._batch:
            self._costs.setdefault(self._batch.bit_length(), deque(maxlen=_SWITCHES)).append(self._seconds)
        self._seconds, self._batch = 0.0, 0
