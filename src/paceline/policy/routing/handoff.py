"""Decides whether a prompt is computed on its decode worker or on a prefill worker. Pure: times are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.cluster_config import HANDOFF_THRESHOLD
from paceline.policy.cost.curve import DecayingMean
from paceline.policy.health import Backoff
from paceline.policy.routing.rates import MIN_TOKENS

FRESH_SECONDS = 60.0
"""Age up to which a measured rate is used. Older rates are measured again, by the threshold."""
TIMEOUT_FACTOR, MIN_TIMEOUT, MAX_TIMEOUT = 4.0, 10.0, 120.0
"""Timeout of a hand-off: this multiple of the expected time, within these bounds in seconds."""


@dataclass(frozen=True, slots=True)
class LocalPrompt:
    """A prompt at its decode worker."""

    uncached: int
    """Tokens that are not in the cache."""
    queued: int
    """Tokens of other prompts that wait for prefill there."""
    running: int
    """Decoding sequences there; a prefill delays each of them."""
    length: int = 0
    """Prompt tokens."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Load of a prefill worker."""

    name: str
    queued: int
    """Prompt tokens that wait for prefill."""
    round_trip: float = 0.0
    """Seconds."""
    window: int = 1 << 30
    """Context length; a prompt must be shorter."""


@dataclass(frozen=True, slots=True)
class Handoff:
    worker: str
    timeout: float
    """Seconds."""


@dataclass(slots=True)
class _Worker:
    rate: DecayingMean = field(default_factory=DecayingMean)
    backoff: Backoff = field(default_factory=Backoff)
    excluded_until: float = 0.0


class HandoffPolicy:
    """Compares the time that the request waits for its first token, and the time that a prefill delays every sequence that
    decodes on the same worker. With l seconds per token on the decode worker and h on the prefill worker (the slower of
    computing and sending, which overlap):

        local:   l (queued + uncached) + running * l * uncached
        remote:  h (queued there + uncached) + two round trips

    Until l and h are measured, prompts with more uncached tokens than the threshold are handed off.
    """

    def __init__(self, threshold: int = HANDOFF_THRESHOLD) -> None:
        self._threshold = threshold
        self._local = DecayingMean()
        self._workers: dict[str, _Worker] = {}

    def choose(self, prompt: LocalPrompt, workers: Sequence[PrefillLoad], now: float) -> Handoff | None:
        """Chooses the prefill worker that computes the prompt. None if the decode worker computes it."""
        usable = [w for w in workers if now >= self._worker(w.name).excluded_until and prompt.length < w.window]
        if not usable or prompt.uncached < min(MIN_TOKENS, self._threshold):
            return None
        # A worker without measurements counts as the fastest, so that it is measured
        rates = {worker.name: _recent(self._worker(worker.name).rate, now) for worker in usable}
        fastest = min((rate for rate in rates.values() if rate is not None), default=None)
        best = min(usable, key=lambda w: (_remote_seconds(prompt, w, rates[w.name] or fastest or 1.0), w.name))
        remote, local = rates[best.name], _recent(self._local, now)
        if remote is None or local is None:
            is_worth = prompt.uncached > self._threshold
        else:
            cost = local * (prompt.queued + prompt.uncached * (1 + prompt.running))
            is_worth = _remote_seconds(prompt, best, remote) < cost
        if not is_worth:
            return None
        expected = MAX_TIMEOUT if remote is None else TIMEOUT_FACTOR * _remote_seconds(prompt, best, remote)
        return Handoff(best.name, min(max(expected, MIN_TIMEOUT), MAX_TIMEOUT))

    def local_seconds(self, tokens: int, now: float) -> float | None:
        """Time to compute `tokens` on the decode worker without a queue. None if there is no recent measurement."""
        rate = _recent(self._local, now)
        return None if rate is None else rate * tokens

    def add_local(self, tokens: int, seconds: float, now: float) -> None:
        """A prompt got its first token on the decode worker, after `tokens` including those queued before it."""
        if tokens >= MIN_TOKENS:
            self._local.add(seconds, tokens, now)

    def add_handoff(self, worker: str, tokens: int, seconds: float, now: float) -> None:
        """A hand-off took `seconds` until the last byte arrived."""
        state = self._worker(worker)
        state.rate.add(seconds, tokens, now)
        state.backoff = Backoff()

    def add_failure(self, worker: str, now: float) -> None:
        """Exclude the worker, longer after each failure. Failures while it is excluded do not count."""
        state = self._worker(worker)
        if now >= state.excluded_until:
            state.excluded_until = now + state.backoff.delay(uptime=0.0)

    def _worker(self, name: str) -> _Worker:
        return self._workers.setdefault(name, _Worker())


def _recent(rate: DecayingMean, now: float) -> float | None:
    """Seconds per token. None if there is no recent measurement."""
    return rate.value(0.0) if rate.weight and now - rate.measured < FRESH_SECONDS else None


def _remote_seconds(prompt: LocalPrompt, worker: PrefillLoad, rate: float) -> float:
    return rate * (worker.queued + prompt.uncached) + 2 * worker.round_trip
