"""A reference of the KV router: the same decisions, from all loads and all costs, computed for every request."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from paceline.core.clock import Clock
from paceline.core.kv_events import TIERS
from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.routing.kv_index import KvIndex, Match
from paceline.policy.routing.kv_router import (
    GOOD_ENOUGH_SECONDS,
    MANY_WORKERS,
    MAX_CANDIDATES,
    REFRESH_SECONDS,
    STRIDE,
    Reservations,
)
from paceline.policy.routing.rates import MIN_TOKENS, RoutedRequest, WorkerRates, measure
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad
from paceline.policy.routing.worker_costs import (
    COMPUTE_FACTOR,
    EVICTION_FACTOR,
    FULL_BATCH_SLOWDOWN,
    LOAD_SECONDS,
    EvictionCost,
    PrefillQueue,
)

TokensByTier = Mapping[int, Sequence[int]]


@dataclass(slots=True)
class _Worker:
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    eviction: EvictionCost = field(default_factory=EvictionCost)
    last_start: float = 0.0
    """Time of the last first token after a measurable prefill."""
    number: int = 0
    """Number in the index."""
    last_chosen: int = 0
    """Number of the decision that last chose it."""


class PlainRouter:
    """`KvRouter` without kept costs: it reads every load and computes every cost of a search again."""

    def __init__(self, index: KvIndex, clock: Clock, shares_caches: bool = False) -> None:
        """`shares_caches`: workers may fetch cached blocks from each other."""
        self._index = index
        self._clock = clock
        self._shares_caches = shares_caches
        self.rates = WorkerRates()
        self._requests: dict[str, RoutedRequest] = {}
        self._reservations = Reservations()
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []
        """Workers in the order of the last decision. The lists below have the same order."""
        self._ordered: list[_Worker] = []
        self._prefill: list[float] = []
        """Seconds per token."""
        self._capacities: list[int] = []
        self._compute_cost: list[float] = []
        """Cost of computing a token: its time and the surcharges."""
        self._min_cost = 0.0
        self._least_cost = 0.0
        """Cost of a token on the least loaded worker."""
        self._full_batch = LOAD_SECONDS
        """Cost of a full batch."""
        self._batch_size = 0.0
        """Sequences of a full batch, mean over workers."""
        self._peer = math.inf
        """Seconds per token fetched from another worker; infinite until measured."""
        self._refreshed = 0.0
        self._all_numbers: tuple[int, ...] = ()
        """Index numbers of all workers."""
        self._positions: dict[int, int] = {}
        """Position in the lists, by index number."""
        self._num_decisions = 0

    def choose(self, prompt: RoutedPrompt, workers: Sequence[WorkerLoad]) -> str:
        names = [worker.name for worker in workers]
        if names != self._names:
            self._set_workers(names)
        now = self._clock.now()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refresh(workers, now)
        match = self._index.match(prompt.ids, prompt.salt)
        count, min_cost = len(prompt.ids), self._min_cost
        best, position, cached = math.inf, 0, 0
        groups = match.groups
        if self._reservations:
            reserved = self._reservations.match(match.chain)
            groups = sorted((*groups, *reserved), key=itemgetter(0), reverse=True)
        longest = self._longest(match) if self._shares_caches else 0
        # Most cached first. No worker of a group costs less than computing the rest at the best rate.
        for tokens, numbers in (*groups, (0, self._all_numbers)):
            fetchable = max(0, longest - tokens)
            if min_cost * (count - tokens - fetchable) + min(min_cost, self._peer) * fetchable > best:
                break
            by_tier = match.lower if tokens else {}
            cost, at = self._best(numbers, workers, count - tokens, fetchable, now, by_tier)
            if cost < best:
                best, position, cached = cost, at, tokens
        self._num_decisions += 1
        self._ordered[position].last_chosen = self._num_decisions
        if prompt.request_id:
            self._add(prompt.request_id, position, count, cached, max(0, longest - cached), now, match)
        return names[position]

    def started(self, request_id: str, cached: int) -> None:
        request = self._requests.get(request_id)
        if request is None or request.has_started:
            return
        request.has_started, now = True, self._clock.now()
        worker = self._workers[request.worker]
        worker.queue.remove(request_id, now)
        measure(self.rates, request, cached, now - max(request.since, worker.last_start), now)
        if request.num_tokens - cached >= MIN_TOKENS:
            worker.last_start = now

    def ended(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._reservations.remove(request_id)
        now = self._clock.now()
        if request.has_started:
            self.rates.add_duration(request.worker, now - request.since)
        else:
            self._workers[request.worker].queue.remove(request_id, now)

    def _longest(self, match: Match) -> int:
        """Most tokens of the prompt that one of the candidates holds."""
        positions = self._positions
        return next((tokens for tokens, numbers in match.groups if any(number in positions for number in numbers)), 0)

    def _best(
        self,
        numbers: Sequence[int],
        workers: Sequence[WorkerLoad],
        uncached: int,
        fetchable: int,
        now: float,
        by_tier: TokensByTier,
    ) -> tuple[float, int]:
        """The least cost and its position; ties go to the worker chosen longest ago. Among many workers, the first one that
        is good enough, or the best of `MAX_CANDIDATES`; each search starts elsewhere."""
        best, best_at, best_chosen, enough = math.inf, 0, 0, -math.inf
        if len(numbers) > MANY_WORKERS:
            start = self._num_decisions * STRIDE % len(numbers)
            enough = self._least_cost * uncached + GOOD_ENOUGH_SECONDS
            end = start + MAX_CANDIDATES
            numbers = (*numbers[start:end], *numbers[: max(0, min(start, end - len(numbers)))])
        positions, ordered, prefill, peer = self._positions, self._ordered, self._prefill, self._peer
        for number in numbers:
            at = positions.get(number)
            if at is None:  # not a candidate
                continue
            known, worker, compute = ordered[at], workers[at], self._compute_cost[at]
            share = worker.assigned / worker.max_num_seqs
            computing = compute * (1.0 + share * self._batch_size)
            cost = computing * uncached + self._full_batch * share
            if fetchable and peer < computing:
                cost -= (computing - peer) * fetchable
            if known.queue.waiting:
                cost += known.queue.seconds(prefill[at], now)
            if share >= 1.0:  # the sequences waiting there, and this one, need free places
                waiting = worker.assigned - worker.max_num_seqs + 1
                cost += waiting * self.rates.duration(worker.name) / worker.max_num_seqs
            if by_tier and number in by_tier:
                cost += self._load_seconds(by_tier[number])
            if cost < best or (cost == best and known.last_chosen < best_chosen):
                best, best_at, best_chosen = cost, at, known.last_chosen
                if best <= enough:
                    break
        return best, best_at

    def _load_seconds(self, by_tier: Sequence[int]) -> float:
        return sum(self.rates.load(tier) * tokens for tier, tokens in zip(TIERS, by_tier, strict=False))

    def _set_workers(self, names: list[str]) -> None:
        busy = {request.worker for request in self._requests.values()}
        for gone in set(self._workers) - set(names) - busy:
            del self._workers[gone]
            self.rates.forget(gone)
        self._names = names
        self._ordered = [self._workers.setdefault(name, _Worker()) for name in names]
        self._refreshed = -math.inf
        for name, known in zip(names, self._ordered, strict=True):
            known.number = self._index.number(name)
        self._positions = {known.number: at for at, known in enumerate(self._ordered)}
        self._all_numbers = tuple(self._positions)

    def _refresh(self, workers: Sequence[WorkerLoad], now: float) -> None:
        """Read all rates together: workers without measurements use the common rate."""
        self.rates.set_lower_bound(max((known.queue.min_rate(now) for known in self._ordered), default=0.0))
        self._prefill = [self.rates.prefill(name, now) for name in self._names]
        peer = self.rates.peer()
        self._peer = math.inf if peer is None else peer
        self._capacities, self._compute_cost = [worker.kv_tokens for worker in workers], [0.0] * len(workers)
        for at in range(len(workers)):
            self._update_cost(at, now)
        self._min_cost, self._refreshed = min(self._compute_cost), now
        self._batch_size = sum([worker.max_num_seqs for worker in workers]) / len(workers)
        emptiest = min([worker.assigned / worker.max_num_seqs for worker in workers])
        self._least_cost = self._min_cost * (1.0 + emptiest * self._batch_size)
        self._full_batch = max(LOAD_SECONDS, FULL_BATCH_SLOWDOWN * self.rates.mean_duration(0.0))

    def _update_cost(self, at: int, now: float) -> None:
        cached = self._index.num_blocks(self._names[at], "device") * BLOCK_SIZE
        share = self._ordered[at].eviction.share(cached, self._capacities[at], now)
        self._compute_cost[at] = self._prefill[at] * (COMPUTE_FACTOR + EVICTION_FACTOR * share)

    def _add(self, request_id: str, at: int, count: int, cached: int, fetchable: int, now: float, match: Match) -> None:
        name, known = self._names[at], self._ordered[at]
        by_tier = match.lower.get(known.number, ()) if cached else ()
        self._requests[request_id] = RoutedRequest(name, count, cached, fetchable, by_tier, now)
        self._reservations.add(request_id, known.number, match.chain)
        fetched = fetchable if self._peer < self._prefill[at] else 0
        loading = self._load_seconds(by_tier) + (self._peer * fetched if fetched else 0.0)
        known.queue.add(request_id, count - cached - fetched, loading, now)
        known.eviction.add(count - cached, now)
        self._update_cost(at, now)
