"""Pairing of targets with draft workers, and of pools with nodes. The functions are pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import PoolConfig

SAMPLES = 16


class RoundTrip:
    """Minimum and median of a draft worker's recent response times.

    A target does not read responses while it verifies, so a sample may end late. Only samples that the target waited for
    count. Without such samples, the late ones are an upper bound.
    """

    def __init__(self) -> None:
        self._waited: deque[float] = deque(maxlen=SAMPLES)
        self._others: deque[float] = deque(maxlen=SAMPLES)

    def observe(self, seconds: float, was_waiting: bool) -> None:
        (self._waited if was_waiting else self._others).append(seconds)

    @property
    def seconds(self) -> float | None:
        """Minimum: the network distance."""
        return min(self._waited or self._others, default=None)

    @property
    def measured(self) -> float | None:
        """Minimum of the samples that the target waited for; None without any."""
        return min(self._waited, default=None)

    @property
    def usual(self) -> float | None:
        """Median: the expected time of a response, including delays at the worker."""
        samples = self._waited or self._others
        return median_high(samples) if samples else None


@dataclass(frozen=True, slots=True)
class DraftView:
    """A draft worker as a target sees it."""

    name: str
    round_trip: float | None
    """Seconds; None before the first response."""
    queue: float
    """Drafting time queued there, seconds."""
    is_usable: bool

    @property
    def cost(self) -> float:
        return (self.round_trip or 0.0) + self.queue


class Pairing:
    """Chooses the draft worker with the least cost. It changes only for a lasting gain, because a change costs a draft
    prefill."""

    def __init__(self, margin: float = 0.25, min_gain: float = 0.0005, hold: float = 2.0) -> None:
        """Another worker must cost less by the share `margin` and by `min_gain` seconds, for `hold` seconds."""
        self._margin, self._min_gain, self._hold = margin, min_gain, hold
        self._current: str | None = None
        self._candidate: str | None = None
        self._since = 0.0

    def choose(self, views: Sequence[DraftView], now: float) -> str | None:
        """The worker for the next sequence; None if none is usable."""
        usable = {view.name: view for view in views if view.is_usable}
        if not usable:
            self._current = self._candidate = None
            return None
        best = min(usable.values(), key=lambda view: (view.cost, view.name))
        current = usable.get(self._current) if self._current is not None else None
        if current is None:
            self._current, self._candidate = best.name, None
        elif best.cost > current.cost * (1.0 - self._margin) or current.cost - best.cost < self._min_gain:
            self._candidate = None
        elif self._candidate != best.name:
            self._candidate, self._since = best.name, now
        elif now - self._since >= self._hold:
            self._current, self._candidate = best.name, None
        return self._current


def is_worth_waiting(ready: int, missing: int, gain: float, wait: float, step: float) -> bool:
    """Whether a target extends its draft deadline by `wait` seconds for `missing` drafts, when `ready` have arrived.

    `step` is the time of a step in seconds. `gain` is the number of tokens that a draft adds to a sequence's step. Waiting pays
    if

        (ready + missing) (1 + gain) / (step + wait)  >  (ready (1 + gain) + missing) / step
    """
    drafted = 1.0 + gain
    return (ready + missing) * drafted * step > (ready * drafted + missing) * (step + wait)


def colocated_pools(config: ClusterConfig, pool: PoolConfig, worker: int) -> list[PoolConfig]:
    """Pools whose worker number `worker` shares a node with that of `pool`. The pool whose nodes the other pools share is
    first.

    Returns only `pool` if no pool shares its nodes, or if the pool whose nodes it shares has fewer workers.
    """
    host = pool.placement.with_pool or pool.name
    group = [
        member
        for member in config.pools
        if host in (member.name, member.placement.with_pool) and worker < member.replicas
    ]
    group.sort(key=lambda member: member.name != host)
    return group if group and group[0].name == host else [pool]
