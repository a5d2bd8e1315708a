"""Measured speed of each worker: prefill, request duration, cache loads and transfers. Pure: times are arguments."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.kv_events import TIERS, Tier
from paceline.policy.cost.curve import DecayingMean
from paceline.policy.routing.kv_index import MIN_PEER_TOKENS

MIN_TOKENS = 64
"""Shorter prefills are not measured: fixed costs dominate them."""
HALF_LIFE = 60.0
"""Seconds in which a worker's rate moves half-way back to the common rate, so that a slow worker is tried again."""
SECONDS_PER_TOKEN = 2e-4
SECONDS_PER_REQUEST = 1.0
LOAD_SECONDS_PER_TOKEN: Mapping[Tier, float] = {"device": 0.0, "host": 5e-6, "disk": 5e-5}
"""Rates before the first measurement."""


class WorkerRates:
    """Rates by worker. A worker without measurements gets the common rate."""

    def __init__(self) -> None:
        self._prefill: dict[str, DecayingMean] = {}
        self._duration: dict[str, DecayingMean] = {}
        self._common_prefill = DecayingMean()
        self._common_duration = DecayingMean()
        self._load = {tier: DecayingMean() for tier in TIERS}
        self._peer = DecayingMean()
        self._default_prefill = SECONDS_PER_TOKEN

    def set_lower_bound(self, seconds_per_token: float) -> None:
        """Raise the default prefill rate to that of a prefill still running, until one has finished."""
        self._default_prefill = max(self._default_prefill, seconds_per_token)

    def add_prefill(self, worker: str, tokens: int, seconds: float, now: float) -> None:
        if tokens >= MIN_TOKENS:
            _mean_of(self._prefill, worker).add(seconds, tokens, now)
            self._common_prefill.add(seconds, tokens)

    def add_duration(self, worker: str, seconds: float) -> None:
        """A request ran for `seconds`."""
        _mean_of(self._duration, worker).add(seconds, 1)
        self._common_duration.add(seconds, 1)

    def add_load(self, tier: Tier, tokens: int, seconds: float) -> None:
        """The blocks of `tokens` were loaded to a device from `tier`."""
        self._load[tier].add(seconds, tokens)

    def add_peer_fetch(self, tokens: int, seconds: float) -> None:
        """A worker fetched the blocks of `tokens` from another, or computed them after a failed fetch."""
        self._peer.add(seconds, tokens)

    def forget(self, worker: str) -> None:
        self._prefill.pop(worker, None)
        self._duration.pop(worker, None)

    def prefill(self, worker: str, now: float) -> float:
        """Seconds per token."""
        common = self._common_prefill.value(self._default_prefill)
        own = self._prefill.get(worker)
        if own is None:
            return common
        return common + (own.value(common) - common) * math.exp2((own.measured - now) / HALF_LIFE)

    def prefills(self, workers: Sequence[str], now: float) -> list[float]:
        """`prefill` of each."""
        common, get, exp2 = self._common_prefill.value(self._default_prefill), self._prefill.get, math.exp2
        # A worker with an entry has a measurement
        return [
            common
            if (own := get(worker)) is None
            else common + (own.total / own.weight - common) * exp2((own.measured - now) / HALF_LIFE)
            for worker in workers
        ]

    @property
    def has_prefill(self) -> bool:
        """Whether any prefill was measured; then no default applies."""
        return self._common_prefill.weight > 0.0

    def duration(self, worker: str) -> float:
        """Seconds per request."""
        return self._duration.get(worker, self._common_duration).value(SECONDS_PER_REQUEST)

    def mean_duration(self, default: float) -> float:
        """Seconds per request, of all workers; `default` before the first measurement."""
        return self._common_duration.value(default)

    def peer(self) -> float | None:
        """Seconds per token fetched from another worker. None if it was not measured."""
        return self._peer.value(0.0) if self._peer.weight else None

    def load(self, tier: Tier) -> float:
        """Seconds per token loaded from `tier`."""
        return self._load[tier].value(LOAD_SECONDS_PER_TOKEN[tier])


def _mean_of(means: dict[str, DecayingMean], worker: str) -> DecayingMean:
    """The worker's mean, which is created with its first measurement."""
    known = means.get(worker)
    if known is None:
        known = means[worker] = DecayingMean()
    return known


@dataclass(slots=True)
class RoutedRequest:
    """A request in flight at a worker, with the router's assumptions about its prompt."""

    worker: str
    num_tokens: int
    """Prompt tokens."""
    num_cached: int
    """Prompt tokens expected in the worker's cache, including those being computed there."""
    num_fetchable: int
    """Further prompt tokens that another worker holds."""
    by_tier: Sequence[int]
    """`num_cached` by tier; empty if all are on the device."""
    since: float
    has_started: bool = False


def measure(rates: WorkerRates, request: RoutedRequest, cached: int, seconds: float, now: float) -> None:
    """Update `rates` from the first token of a request: it took `seconds`, with `cached` prompt tokens in the cache.

    Time beyond computing is the time of loads and fetches. Without a single source for it, nothing is measured.
    """
    computed, surplus = max(0, request.num_tokens - cached), cached - request.num_cached
    rate = rates.prefill(request.worker, now)
    rest = max(0.0, seconds - rate * computed)
    if request.by_tier and any(request.by_tier[1:]):
        lower = [(tier, tokens) for tier, tokens in zip(TIERS[1:], request.by_tier[1:], strict=False) if tokens]
        if len(lower) == 1 and 0 <= surplus < MIN_TOKENS:
            [(tier, tokens)] = lower
            rates.add_load(tier, tokens, rest)
    elif request.num_fetchable >= MIN_PEER_TOKENS and surplus >= MIN_TOKENS:
        rates.add_peer_fetch(surplus, rest)
    else:
        rates.add_prefill(request.worker, computed, seconds, now)
        if request.num_fetchable >= MIN_PEER_TOKENS and rates.peer() is not None:
            rates.add_peer_fetch(request.num_fetchable, rate * request.num_fetchable)  # computed instead
