"""How fast each worker is, from what its requests took. Pure: seconds come from outside."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.kv_events import TIERS, Tier

MEMORY = 0.9
"""Weight that what is known keeps when something new is measured."""
LEAST_TOKENS = 64
"""A prefill of fewer says more about the rest of the way than about the prefill."""
HALF_LIFE = 60.0
"""Seconds in which half of what sets a worker apart is forgotten: one that was slow, and got nothing since, is tried again."""
SECONDS_PER_TOKEN = 2e-4
SECONDS_PER_REQUEST = 1.0
LOAD_SECONDS_PER_TOKEN: Mapping[Tier, float] = {"device": 0.0, "host": 5e-6, "disk": 5e-5}
"""Assumed until the first measurement."""


@dataclass(slots=True)
class Mean:
    """Seconds per unit, old measurements fading."""

    seconds: float = 0.0
    units: float = 0.0
    measured: float = 0.0
    """When last."""

    def add(self, seconds: float, units: float, now: float = 0.0) -> None:
        self.seconds = MEMORY * self.seconds + seconds
        self.units = MEMORY * self.units + units
        self.measured = now

    def value(self, unknown: float) -> float:
        return self.seconds / self.units if self.units else unknown


class WorkerRates:
    """A worker that was never measured is taken to be like the others."""

    def __init__(self) -> None:
        self._prefill: dict[str, Mean] = {}
        self._stay: dict[str, Mean] = {}
        self._all_prefill = Mean()
        self._all_stay = Mean()
        self._load = {tier: Mean() for tier in TIERS}
        self._peer = Mean()
        self._supposed = SECONDS_PER_TOKEN

    def suppose(self, seconds_per_token: float) -> None:
        """A prefill under way has taken so long already: until one is done, nobody is thought to be faster."""
        self._supposed = max(self._supposed, seconds_per_token)

    def prefilled(self, worker: str, tokens: int, seconds: float, now: float) -> None:
        """It took that long to compute so many tokens of a prompt."""
        if tokens >= LEAST_TOKENS:
            self._prefill.setdefault(worker, Mean()).add(seconds, tokens, now)
            self._all_prefill.add(seconds, tokens)

    def stayed(self, worker: str, seconds: float) -> None:
        """A request kept its seat for so long."""
        self._stay.setdefault(worker, Mean()).add(seconds, 1)
        self._all_stay.add(seconds, 1)

    def loaded(self, tier: Tier, tokens: int, seconds: float) -> None:
        """So many tokens' blocks were brought to a device from `tier`."""
        self._load[tier].add(seconds, tokens)

    def fetched(self, tokens: int, seconds: float) -> None:
        """A worker took so many tokens' blocks from another, or was to, and it took that long until they were there."""
        self._peer.add(seconds, tokens)

    def forget(self, worker: str) -> None:
        self._prefill.pop(worker, None)
        self._stay.pop(worker, None)

    def prefill(self, worker: str, now: float) -> float:
        """Seconds per token."""
        common = self._all_prefill.value(self._supposed)
        own = self._prefill.get(worker)
        if own is None:
            return common
        return common + (own.value(common) - common) * math.exp2((own.measured - now) / HALF_LIFE)

    def stay(self, worker: str) -> float:
        """Seconds per request."""
        return self._stay.get(worker, self._all_stay).value(SECONDS_PER_REQUEST)

    def peer(self) -> float | None:
        """Seconds per token; None: no worker has taken anything from another yet."""
        return self._peer.value(0.0) if self._peer.units else None

    def load(self, tier: Tier) -> float:
        """Seconds per token."""
        return self._load[tier].value(LOAD_SECONDS_PER_TOKEN[tier])
