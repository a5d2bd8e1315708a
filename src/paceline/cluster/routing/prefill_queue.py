"""What a router has sent to a worker and not seen a token of: how long until all of it is computed."""

from paceline.cluster.routing.worker_rates import LEAST_TOKENS


class PrefillQueue:
    """Prompts are taken to be computed one after the other, in the order they were sent. Kept as tokens, not as seconds: what
    was learned about the worker since holds for those that wait too."""

    __slots__ = ("_head", "_loading", "_since", "_tokens", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        """By request: tokens to be computed, and seconds to load others."""
        self._tokens = 0
        self._loading = 0.0
        self._head = (0, 0.0)
        self._since = 0.0
        """When the first of them began."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request_id: str, tokens: int, loading: float, now: float) -> None:
        if not self._waiting:
            self._head, self._since = (tokens, loading), now
        self._waiting[request_id] = tokens, loading
        self._tokens += tokens
        self._loading += loading

    def remove(self, request_id: str, now: float) -> None:
        """It has its first token, or will get none here."""
        if next(iter(self._waiting)) == request_id:
            self._since = now
        tokens, loading = self._waiting.pop(request_id)
        self._tokens -= tokens
        self._loading = self._loading - loading if self._waiting else 0.0
        self._head = next(iter(self._waiting.values()), (0, 0.0))

    def seconds(self, rate: float, now: float) -> float:
        """At `rate` seconds a token. A first one that is late already is taken to need as long again."""
        if not self._waiting:
            return 0.0
        tokens, loading = self._head
        first = rate * tokens + loading
        return rate * (self._tokens - tokens) + self._loading - loading + abs(first - (now - self._since))

    def least_rate(self, now: float) -> float:
        """Seconds a token that the first one has taken so far, if that says anything."""
        tokens, _ = self._head
        return (now - self._since) / tokens if tokens >= LEAST_TOKENS else 0.0
