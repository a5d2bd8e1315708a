"""What a request costs on each candidate of the KV router, kept up to date worker by worker.

`PrefillQueue` holds the prompts that wait for prefill at one worker. `EvictionCost` estimates the share of one worker's cache
that is in use, and so lost if a new prompt evicts it.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from operator import is_

from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.rates import MIN_TOKENS, WorkerRates
from paceline.policy.routing.router import WorkerLoad, WorkerTable

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


LOAD_SECONDS = 1e-3
"""Cost of a full batch beyond its queue, until the duration of requests is known. Of equally good workers the emptier one is
chosen."""
FULL_BATCH_SLOWDOWN = 1.0
"""Time that a full batch adds to the duration of a request, relative to that duration."""
COMPUTE_FACTOR = 1.25
"""Cost of computing a token, relative to its time: requests that arrive later wait meanwhile. Requests that arrive together
with the same new prompt then wait for one worker, instead of computing it on each."""
EVICTION_FACTOR = 1.0
"""Additional cost where computing evicts blocks in use. It spreads prompts over all caches."""

FEW_CHANGES = 4
"""Inverse share of changed loads up to which costs are updated one by one. If more change, all are computed again."""


@dataclass(slots=True, eq=False)
class RoutedWorker:
    """State of one worker at the router."""

    name: str
    number: int
    """Number in the index."""
    cached: Sized
    """Blocks on its device, of `BLOCK_SIZE` tokens."""
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    eviction: EvictionCost = field(default_factory=EvictionCost)
    last_start: float = 0.0
    """Time of the last first token after a measurable prefill."""
    last_chosen: int = 0
    """Number of the decision that last chose it."""
    position: int = -1
    """Position among the candidates; -1: it is none."""


class WorkerCosts:
    """The lists have one entry per candidate. A request that computes n tokens costs on each

        token[i] * n + full_batch * shares[i] + the time of its queue, at least token[i] * n + fixed[i]

    `follow` and the `update` methods change single entries; `refresh` reads all rates again.
    """

    def __init__(self, index: KvIndex, rates: WorkerRates) -> None:
        self._index, self._rates = index, rates
        self.by_name: dict[str, RoutedWorker] = {}
        """All workers with candidates or requests."""
        self.names: list[str] = []
        self.workers: list[RoutedWorker] = []
        self.all_numbers: tuple[int, ...] = ()
        """Index numbers of all candidates."""
        self._is_ordered = False
        """Whether the candidates have the first index numbers, in their order."""
        self.positions: dict[int, int] = {}
        """Position by index number."""
        self.prefill: list[float] = []
        """Seconds per token."""
        self.token: list[float] = []
        """Cost of a computed token: its time, the surcharges, and the delay of the sequences that decode there."""
        self.fixed: list[float] = []
        """Least cost without computed tokens: the share of the batch in use, and the queue behind its first prompt."""
        self.shares: list[float] = []
        """Sequences relative to the largest batch."""
        self.min_compute = 0.0
        """Least cost of computing a token, without the delay of other sequences."""
        self.least_token = 0.0
        """Cost of a token on the least loaded worker."""
        self.peer = math.inf
        """Seconds per token fetched from another worker; infinite until measured."""
        self.refreshed = -math.inf
        self._compute: list[float] = []
        """Cost of computing a token, without the delay of other sequences."""
        self._capacities: list[int] = []
        self._assigned: list[int] = []
        self._limits: list[int] = []
        """Largest batches."""
        self._queued: list[float] = []
        """Time of each queue behind its first prompt."""
        self._batch_size = 0.0
        """Sequences of a full batch, mean over workers."""
        self.full_batch = LOAD_SECONDS
        """Cost of a full batch."""
        self._last: Sequence[WorkerLoad] = ()
        """Loads of the last call, if it had a plain list."""
        self._table: WorkerTable | None = None
        self._generation = -1

    def set_loads(self, loads: Sequence[WorkerLoad]) -> bool:
        """Take over the candidates and their loads. Whether the candidates have changed."""
        if isinstance(loads, WorkerTable):
            changes = loads.take_changes()
            if loads is self._table and loads.generation == self._generation:
                for at in changes:
                    self._update_load(at, loads.assigned[at], loads.max_num_seqs[at])
                return False
            self._table, self._generation = loads, loads.generation
        elif len(loads) == len(self._last) and all(map(is_, loads, self._last)):
            return False
        else:
            self._table = None
        self._last = () if self._table is not None else list(loads)
        names = [load.name for load in loads]
        is_new = names != self.names
        if is_new:
            self._set_names(names)
        assigned, limits = [load.assigned for load in loads], [load.max_num_seqs for load in loads]
        if limits == self._limits:
            changed = [at for at, (now, old) in enumerate(zip(assigned, self._assigned, strict=True)) if now != old]
            if len(changed) <= len(names) // FEW_CHANGES:
                for at in changed:
                    self._update_load(at, assigned[at], limits[at])
                return is_new
        self._assigned, self._limits = assigned, limits
        self.shares = [count / most for count, most in zip(assigned, limits, strict=True)]
        if self.prefill:
            self._spread_loads()
        return is_new

    @property
    def has_same_numbers(self) -> bool:
        """Whether the number of every worker of the index is its position."""
        return self._is_ordered and self._index.num_holders == len(self.names)

    def positions_of(self, numbers: Sequence[int]) -> list[int]:
        """Positions of the candidates among these workers of the index."""
        find = self.positions.get
        return [at for number in numbers if (at := find(number)) is not None]

    def forget(self, busy: set[str]) -> None:
        """Remove workers that are no candidates and have none of the requests."""
        for gone in self.by_name.keys() - set(self.names) - busy:
            del self.by_name[gone]
            self._rates.forget(gone)

    def refresh(self, loads: Sequence[WorkerLoad], now: float) -> None:
        """Read all rates together: workers without measurements use the common rate."""
        rates = self._rates
        if not rates.has_prefill:
            rates.set_lower_bound(max((known.queue.min_rate(now) for known in self.workers), default=0.0))
        self.prefill = rates.prefills(self.names, now)
        peer = rates.peer()
        self.peer, self.refreshed = math.inf if peer is None else peer, now
        self._capacities = (
            list(loads.kv_tokens) if isinstance(loads, WorkerTable) else [load.kv_tokens for load in loads]
        )
        in_use = [
            known.eviction.share(len(known.cached) * BLOCK_SIZE, tokens, now)
            for known, tokens in zip(self.workers, self._capacities, strict=True)
        ]
        self._compute = [
            rate * (COMPUTE_FACTOR + EVICTION_FACTOR * share) for rate, share in zip(self.prefill, in_use, strict=True)
        ]
        self.min_compute = min(self._compute)
        self._batch_size = sum(self._limits) / len(loads)
        self.least_token = self.min_compute * (1.0 + min(self.shares) * self._batch_size)
        self.full_batch = max(LOAD_SECONDS, FULL_BATCH_SLOWDOWN * rates.mean_duration(0.0))
        self._queued = [
            known.queue.behind_first(rate) if known.queue.waiting else 0.0
            for known, rate in zip(self.workers, self.prefill, strict=True)
        ]
        self._spread_loads()

    def update_compute(self, at: int, now: float) -> None:
        """A request was sent to this worker."""
        known = self.workers[at]
        share = known.eviction.share(len(known.cached) * BLOCK_SIZE, self._capacities[at], now)
        self._compute[at] = self.prefill[at] * (COMPUTE_FACTOR + EVICTION_FACTOR * share)
        self.token[at] = self._compute[at] * (1.0 + self.shares[at] * self._batch_size)

    def update_queue(self, known: RoutedWorker) -> None:
        """The worker's queue has changed."""
        at = known.position
        if 0 <= at < len(self.prefill):
            self._queued[at] = known.queue.behind_first(self.prefill[at])
            self.fixed[at] = self.full_batch * self.shares[at] + self._queued[at]

    def wait_seconds(self, at: int) -> float:
        """Time until a full batch has a place for one more request, after those that wait there."""
        waiting = self._assigned[at] - self._limits[at] + 1
        return waiting * self._rates.duration(self.names[at]) / self._limits[at]

    def _update_load(self, at: int, assigned: int, limit: int) -> None:
        self._assigned[at], self._limits[at] = assigned, limit
        share = self.shares[at] = assigned / limit
        if self.prefill:
            self.token[at] = self._compute[at] * (1.0 + share * self._batch_size)
            self.fixed[at] = self.full_batch * share + self._queued[at]

    def _spread_loads(self) -> None:
        """`token` and `fixed` of all workers, from their shares."""
        size, full = self._batch_size, self.full_batch
        self.token = [compute * (1.0 + share * size) for compute, share in zip(self._compute, self.shares, strict=True)]
        self.fixed = [full * share + queued for share, queued in zip(self.shares, self._queued, strict=True)]

    def _set_names(self, names: list[str]) -> None:
        for known in self.workers:
            known.position = -1
        self.names = names
        self.workers = [self.by_name.get(name) or self._add(name) for name in names]
        for at, known in enumerate(self.workers):
            known.position = at
        self.positions = {known.number: at for at, known in enumerate(self.workers)}
        self.all_numbers = tuple(self.positions)
        self._is_ordered = self.all_numbers == tuple(range(len(names)))
        self.refreshed, self.prefill = -math.inf, []
        self._assigned, self._limits = [], []

    def _add(self, name: str) -> RoutedWorker:
        known = self.by_name[name] = RoutedWorker(name, self._index.number(name), self._index.device_blocks(name))
        return known
