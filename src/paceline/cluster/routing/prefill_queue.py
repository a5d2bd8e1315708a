"""Per-worker state of the KV router: prompts waiting for prefill, and the cost of evicting cached blocks."""

import math

from paceline.cluster.routing.worker_rates import MIN_TOKENS

EVICTION_HALF_LIFE = 300.0
"""Seconds in which half of the computed prompts are assumed to be no longer in use."""
STALE_SHARE = 0.25
"""Share of the other cached tokens that is assumed to be in use."""


class PrefillQueue:
    """Prompts sent to a worker that have no token yet, computed in order. It holds tokens rather than seconds, so that a
    better rate applies to all of them."""

    __slots__ = ("_first", "_loading", "_since", "_tokens", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[int, float]] = {}
        """Tokens to compute and seconds of loading, by request."""
        self._tokens = 0
        self._loading = 0.0
        self._first = (0, 0.0)
        """The request being computed."""
        self._since = 0.0
        """Start of the first request."""

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, request_id: str, tokens: int, loading: float, now: float) -> None:
        if not self.waiting:
            self._first, self._since = (tokens, loading), now
        self.waiting[request_id] = tokens, loading
        self._tokens += tokens
        self._loading += loading

    def remove(self, request_id: str, now: float) -> None:
        """The request has its first token, or left the worker."""
        waiting = self.waiting
        if next(iter(waiting)) == request_id:
            self._since = now
        tokens, loading = waiting.pop(request_id)
        self._tokens -= tokens
        if waiting:
            self._loading -= loading
            self._first = next(iter(waiting.values()))
        else:
            self._loading, self._first = 0.0, (0, 0.0)

    def seconds(self, rate: float, now: float) -> float:
        """Time until the queue is empty, at `rate` seconds per token. A first request that is late by t counts t more."""
        if not self.waiting:
            return 0.0
        tokens, loading = self._first
        first = rate * tokens + loading
        return rate * (self._tokens - tokens) + self._loading - loading + abs(first - (now - self._since))

    def behind_first(self, rate: float) -> float:
        """Time of the requests after the first: a lower bound of `seconds`."""
        tokens, loading = self._first
        return rate * (self._tokens - tokens) + self._loading - loading

    def min_rate(self, now: float) -> float:
        """Seconds per token that the first request has taken so far; 0 if it is too short to measure."""
        tokens, _ = self._first
        return (now - self._since) / tokens if tokens >= MIN_TOKENS else 0.0


class EvictionCost:
    """Share of one worker's cache that is in use, and so lost if a new prompt evicts it."""

    __slots__ = ("_since", "_tokens")

    def __init__(self) -> None:
        self._tokens = 0.0
        self._since = 0.0

    def add(self, tokens: int, now: float) -> None:
        """`tokens` are computed and cached."""
        self._tokens = self._tokens * math.exp2((self._since - now) / EVICTION_HALF_LIFE) + tokens
        self._since = now

    def share(self, cached: int, capacity: int, now: float) -> float:
        """Between 0 and 1 for a cache of `capacity` tokens that holds `cached`; 0 if the capacity is not known (0)."""
        if not capacity:
            return 0.0
        recent = self._tokens * math.exp2((self._since - now) / EVICTION_HALF_LIFE)
        share = (recent + STALE_SHARE * cached) / capacity
        return share if share < 1.0 else 1.0
