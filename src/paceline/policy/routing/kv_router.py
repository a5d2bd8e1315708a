"""The KV-aware router chooses the worker where a request costs the least time, its own and that of other requests.

`Reservations` holds prefixes that requests in flight will leave in a worker's cache, so that no other worker computes them too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from paceline.core.clock import Clock
from paceline.core.kv_events import TIERS
from paceline.core.sequence import BLOCK_SIZE
from paceline.policy.routing.kv_index import KvIndex, Match
from paceline.policy.routing.prefix_tree import NONE
from paceline.policy.routing.rates import MIN_TOKENS, RoutedRequest, WorkerRates, measure
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad
from paceline.policy.routing.worker_costs import WorkerCosts


class Reservations:
    """The last prompt sent to each worker, for every first block. Prompts are chains of prefix numbers, as in `Match`."""

    def __init__(self) -> None:
        self._by_first: dict[int, dict[int, tuple[str, int, Sequence[int]]]] = {}
        """Request, key of its second block and chain, by the key of the first block and by worker."""
        self._keys: dict[str, tuple[int, int]] = {}
        """Keys into `_by_first`, by request."""

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, request_id: str, worker: int, chain: Sequence[int]) -> None:
        if not len(chain):
            return
        first = chain[0]
        prompts = self._by_first.setdefault(first, {})
        before = prompts.get(worker)
        if before is not None:
            del self._keys[before[0]]
        prompts[worker] = request_id, _second(chain), chain
        self._keys[request_id] = first, worker

    def remove(self, request_id: str) -> None:
        """The request ended. Its blocks are known from KV events."""
        keys = self._keys.pop(request_id, None)
        if keys is not None:
            first, worker = keys
            prompts = self._by_first[first]
            del prompts[worker]
            if not prompts:
                del self._by_first[first]

    def match(self, chain: Sequence[int]) -> list[tuple[int, tuple[int]]]:
        """(tokens of this prompt that the worker will hold, the worker), unordered."""
        if not len(chain):
            return []
        prompts = self._by_first.get(chain[0])
        if prompts is None:
            return []
        second = _second(chain)
        return [
            (_num_common(chain, other) * BLOCK_SIZE if other_second == second else BLOCK_SIZE, (worker,))
            for worker, (_, other_second, other) in prompts.items()
        ]


def _second(chain: Sequence[int]) -> int:
    """Key of the second block, or NONE."""
    return chain[1] if len(chain) > 1 else NONE


def _num_common(chain: Sequence[int], other: Sequence[int]) -> int:
    """Blocks in common, at least one. Prefix numbers are equal only if the whole prefix is, so bisection finds the last."""
    low, high = 1, min(len(chain), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


TokensByTier = Mapping[int, Sequence[int]]
REFRESH_SECONDS = 0.25
"""Interval at which rates are read again."""
MANY_WORKERS, MAX_CANDIDATES = 32, 256
GOOD_ENOUGH_SECONDS = 2.5e-4
"""Among more than `MANY_WORKERS` workers with the same cached tokens, the search stops within this distance of the lower bound,
or after `MAX_CANDIDATES` workers."""
ROUNDING = 1.0 + 1e-9
"""Allowance for sums in another order."""
STRIDE = 7919
"""Prime distance between the starts of two searches."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """The router's estimates of one worker."""

    blocks: int
    """Cached blocks in the index, all tiers."""
    prefill_seconds: float
    """Seconds per prompt token."""
    queue_seconds: float
    """Time until its queued prompts are computed."""


class KvRouter:
    """Estimates the time to first token on each worker:

        queue + prefill_seconds_per_token * (prompt - cached) + sum over tiers of load_seconds_per_token * tokens there

    A prefill delays every sequence that decodes on the worker, and a fuller batch decodes more slowly. So the cost of computed
    tokens counts for each of those sequences too (by the share of the batch in use, so that a larger worker may hold more), and
    that share costs its part of a request's duration (`FULL_BATCH_SLOWDOWN`).

    If workers share caches, tokens that another worker holds cost the measured time of a fetch, where that is less. Computed
    tokens cost more than their time (`COMPUTE_FACTOR`, `EVICTION_FACTOR`). The queue holds the prompts that this router sent
    and, if the worker's batch is full, the wait for a free place. Prefixes in flight count as cached, behind that queue.
    Rates are learned from `started` and `ended`. A prompt matches blocks of its own salt only.
    """

    def __init__(self, index: KvIndex, clock: Clock, shares_caches: bool = False) -> None:
        """`shares_caches` is true if workers may fetch cached blocks from each other."""
        self._index = index
        self._clock = clock
        self._shares_caches = shares_caches
        self.rates = WorkerRates()
        self._requests: dict[str, RoutedRequest] = {}
        self._reservations = Reservations()
        self._costs = WorkerCosts(index, self.rates)
        self._num_decisions = 0

    def choose(self, prompt: RoutedPrompt, workers: Sequence[WorkerLoad]) -> str:
        costs, now = self._costs, self._clock.now()
        if costs.set_loads(workers):
            costs.forget({request.worker for request in self._requests.values()})
        if now - costs.refreshed >= REFRESH_SECONDS:
            costs.refresh(workers, now)
        match = self._index.match(prompt.ids, prompt.salt)
        count, min_cost = len(prompt.ids), costs.min_compute
        best, position, cached = math.inf, 0, 0
        groups = match.groups
        if reserved := self._reservations.match(match.chain):
            groups = sorted((*groups, *reserved), key=itemgetter(0), reverse=True)
        longest = self._longest(match) if self._shares_caches else 0
        token, fixed, positions = costs.token, costs.fixed, costs.positions
        # Most cached first. No worker of a group costs less than computing the rest at the best rate.
        for tokens, numbers in (*groups, (0, costs.all_numbers)):
            uncached, fetchable = float(count - tokens), 0  # a float, as what it multiplies
            if longest > tokens:
                fetchable = longest - tokens
                if min_cost * (uncached - fetchable) + min(min_cost, costs.peer) * fetchable > best:
                    break
            elif min_cost * uncached > best:
                break
            elif len(numbers) == 1:  # most often; `_best` has the same limit
                at = positions.get(numbers[0], -1)
                if at < 0 or token[at] * uncached + fixed[at] > best * ROUNDING:
                    continue
            cost, at = self._best(numbers, uncached, fetchable, match.lower if tokens else {}, now, best)
            if cost < best:
                best, position, cached = cost, at, tokens
        self._num_decisions += 1
        costs.workers[position].last_chosen = self._num_decisions
        if prompt.request_id:
            self._add(prompt.request_id, position, count, cached, max(0, longest - cached), now, match)
        return costs.names[position]

    def started(self, request_id: str, cached: int) -> None:
        request = self._requests.get(request_id)
        if request is None or request.has_started:
            return
        request.has_started, now = True, self._clock.now()
        worker = self._costs.by_name[request.worker]
        worker.queue.remove(request_id, now)
        self._costs.update_queue(worker)
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
            worker = self._costs.by_name[request.worker]
            worker.queue.remove(request_id, now)
            self._costs.update_queue(worker)

    def view(self, worker: str) -> RouterView:
        """Thread-safe."""
        now, known = self._clock.now(), self._costs.by_name.get(worker)
        rate = self.rates.prefill(worker, now)
        return RouterView(self._index.num_blocks(worker), rate, known.queue.seconds(rate, now) if known else 0.0)

    def _longest(self, match: Match) -> int:
        """Most tokens of the prompt that one of the candidates holds."""
        positions = self._costs.positions
        return next((tokens for tokens, numbers in match.groups if any(number in positions for number in numbers)), 0)

    def _best(
        self, numbers: Sequence[int], uncached: float, fetchable: int, by_tier: TokensByTier, now: float, below: float
    ) -> tuple[float, int]:
        """The least cost and its position, if it is less than `below`. Ties go to the worker chosen longest ago. Among many
        workers, it takes the first that is good enough, or the best of `MAX_CANDIDATES`, and each search starts elsewhere.

        `fetchable` is the number of uncached tokens that another worker holds. `by_tier` are the cached tokens by tier, of
        workers that hold some below the device. Without fetches, the time of a queue and other waits only add to
        `token * uncached + fixed`: a worker with more than the best cost there needs no closer look.
        """
        costs, count = self._costs, len(numbers)
        token, fixed, shares, prefill, workers = costs.token, costs.fixed, costs.shares, costs.prefill, costs.workers
        best, best_at, best_chosen, enough = math.inf, 0, 0, -math.inf
        limit = math.inf if fetchable else below * ROUNDING
        full_batch, peer = costs.full_batch, costs.peer
        if count > MANY_WORKERS:
            enough = costs.least_token * uncached + GOOD_ENOUGH_SECONDS
            limit = max(limit, enough)
            numbers = _from(tuple(numbers), self._num_decisions * STRIDE % count)
        positions = numbers if costs.has_same_numbers else costs.positions_of(numbers)
        for at in positions:
            cost = token[at] * uncached
            if cost + fixed[at] > limit:
                continue
            share, known = shares[at], workers[at]
            cost += full_batch * share
            if fetchable and peer < token[at]:
                cost -= (token[at] - peer) * fetchable
            if known.queue.waiting:
                cost += known.queue.seconds(prefill[at], now)
            if share >= 1.0:
                cost += costs.wait_seconds(at)
            if by_tier and known.number in by_tier:
                cost += self._load_seconds(by_tier[known.number])
            if cost <= best and (cost < best or known.last_chosen < best_chosen):
                best, best_at, best_chosen = cost, at, known.last_chosen
                if best <= enough:
                    break
                if not fetchable and best * ROUNDING < limit:
                    limit = best * ROUNDING
        return best, best_at

    def _load_seconds(self, by_tier: Sequence[int]) -> float:
        return sum(self.rates.load(tier) * tokens for tier, tokens in zip(TIERS, by_tier, strict=False))

    def _add(self, request_id: str, at: int, count: int, cached: int, fetchable: int, now: float, match: Match) -> None:
        costs = self._costs
        known = costs.workers[at]
        by_tier = match.lower.get(known.number, ()) if cached else ()
        self._requests[request_id] = RoutedRequest(known.name, count, cached, fetchable, by_tier, now)
        self._reservations.add(request_id, known.number, match.chain)
        fetched = fetchable if costs.peer < costs.prefill[at] else 0
        loading = (self._load_seconds(by_tier) if by_tier else 0.0) + (costs.peer * fetched if fetched else 0.0)
        known.queue.add(request_id, count - cached - fetched, loading, now)
        known.eviction.add(count - cached, now)
        costs.update_compute(at, now)
        costs.update_queue(known)


def _from(numbers: tuple[int, ...], start: int) -> tuple[int, ...]:
    """`MAX_CANDIDATES` of the numbers from `start` on, which continue at their beginning."""
    end = start + MAX_CANDIDATES
    surplus = end - len(numbers)
    return numbers[start:end] + numbers[: min(start, surplus)] if surplus > 0 else numbers[start:end]
