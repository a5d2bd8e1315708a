"""Whether a prompt is computed where it is decoded, or on a prefill worker that hands its cache over. Pure, injected time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.cluster.health.backoff import Backoff
from paceline.cluster.routing.worker_rates import LEAST_TOKENS, Mean
from paceline.core.clock import Clock
from paceline.core.cluster_config import HANDOFF_THRESHOLD

FRESH_SECONDS = 60.0
"""How long a measurement is believed: what is not used for so long is tried again by the threshold."""
PATIENCE, LEAST_PATIENCE, MOST_PATIENCE = 4.0, 10.0, 120.0
"""How long to wait for a hand-off: so many times what it should take, within these seconds."""


@dataclass(frozen=True, slots=True)
class Here:
    """A prompt at its decode worker."""

    uncached: int
    """Tokens that are in no cache here."""
    queued: int
    """Tokens of other prompts that are to be computed here."""
    running: int
    """Streams that decode here: each is held up by a prompt that is computed beside it."""
    length: int = 0
    """All tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """A prefill worker that may be asked."""

    name: str
    queued: int
    """Tokens of prompts that it has yet to compute."""
    round_trip: float = 0.0
    """Seconds."""
    window: int = 1 << 30
    """Tokens of the longest prompt it takes, and one more."""


@dataclass(frozen=True, slots=True)
class Handoff:
    worker: str
    patience: float
    """Seconds after which it has failed."""


@dataclass(slots=True)
class _Rate:
    mean: Mean = field(default_factory=Mean)
    measured: float = 0.0

    def add(self, seconds: float, tokens: int, now: float) -> None:
        self.mean.add(seconds, tokens)
        self.measured = now

    def value(self, now: float) -> float | None:
        """Seconds per token; None: not measured of late."""
        return self.mean.value(0.0) if self.mean.units and now - self.measured < FRESH_SECONDS else None


@dataclass(slots=True)
class _Worker:
    rate: _Rate = field(default_factory=_Rate)
    backoff: Backoff = field(default_factory=Backoff)
    away_until: float = 0.0


class HandoffPolicy:
    """Compares the seconds that somebody waits: the request for its first token, and every running stream while a prompt is
    computed beside it. With l seconds per token here, measured, and h there (computing or sending, whichever is slower, since
    they overlap):

        here:   l (queued + uncached) + running * l * uncached
        there:  h (queued there + uncached) + two round trips

    Until both are measured, prompts with more uncached tokens than the threshold are handed over.
    """

    def __init__(self, clock: Clock, threshold: int = HANDOFF_THRESHOLD) -> None:
        self._clock = clock
        self._threshold = threshold
        self._here = _Rate()
        self._workers: dict[str, _Worker] = {}

    def choose(self, here: Here, workers: Sequence[PrefillLoad]) -> Handoff | None:
        """None: compute it here."""
        now = self._clock.now()
        able = [w for w in workers if now >= self._worker(w.name).away_until and here.length < w.window]
        if not able or here.uncached < min(LEAST_TOKENS, self._threshold):
            return None
        # Who was never measured is taken to be as fast as the fastest: somebody has to measure it
        rates = {worker.name: self._worker(worker.name).rate.value(now) for worker in able}
        fastest = min((rate for rate in rates.values() if rate is not None), default=None)
        best = min(able, key=lambda w: (self._there(here, w, rates[w.name] or fastest or 1.0), w.name))
        there, local = rates[best.name], self._here.value(now)
        if there is None or local is None:
            worth = here.uncached > self._threshold
        else:
            cost = local * (here.queued + here.uncached * (1 + here.running))
            worth = self._there(here, best, there) < cost
        if not worth:
            return None
        expected = None if there is None else self._there(here, best, there)
        patience = MOST_PATIENCE if expected is None else min(max(PATIENCE * expected, LEAST_PATIENCE), MOST_PATIENCE)
        return Handoff(best.name, patience)

    def seconds_here(self, tokens: int) -> float | None:
        """To compute so many with nothing queued before them; None: not measured of late."""
        rate = self._here.value(self._clock.now())
        return None if rate is None else rate * tokens

    def computed_here(self, tokens: int, seconds: float) -> None:
        """A prompt had its first token here, after so many tokens, those queued before it included."""
        if tokens >= LEAST_TOKENS:
            self._here.add(seconds, tokens, self._clock.now())

    def handed_over(self, worker: str, tokens: int, seconds: float) -> None:
        """As above, until the last byte had arrived."""
        one = self._worker(worker)
        one.rate.add(seconds, tokens, self._clock.now())
        one.backoff = Backoff()

    def failed(self, worker: str) -> None:
        """It is left alone for a while, and longer each time; what fails together with something else fails once."""
        one, now = self._worker(worker), self._clock.now()
        if now >= one.away_until:
            one.away_until = now + one.backoff.delay(lived=0.0)

    def _worker(self, name: str) -> _Worker:
        return self._workers.setdefault(name, _Worker())

    @staticmethod
    def _there(here: Here, worker: PrefillLoad, rate: float) -> float:
        return rate * (worker.queued + here.uncached) + 2 * worker.round_trip
