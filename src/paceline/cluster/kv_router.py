"""The worker that will answer first: least prefill of what is not cached, plus loading what is, plus the queue."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cluster.kv_index import KvIndex
from paceline.cluster.router import Prompt, WorkerLoad
from paceline.cluster.worker_rates import WorkerRates
from paceline.core.clock import Clock
from paceline.core.kv_events import TIERS

Lower = Mapping[int, Sequence[int]]
LEARN_SECONDS = 0.25
"""How old the rates may be that go into a decision."""
SPREAD_SECONDS = 1e-3
"""What a full house costs beyond the queue: of workers that are equally good the emptier is taken."""
MANY, MOST = 32, 256
GOOD_SECONDS = 2.5e-4
"""Among more workers than `MANY` that have as much cached, it is enough to be so close to the best there could be, and no more
than `MOST` are looked at."""
STRIDE = 7919
"""A prime: beginnings go around all workers, far from each other."""


@dataclass(slots=True)
class _Placed:
    """A request on its way to its first token."""

    worker: str
    tokens: int
    """To be computed."""
    seconds: float
    """Expected, without the queue."""
    since: float
    started: float | None = None


@dataclass(slots=True)
class _Queue:
    """What this router sent to a worker and has not seen a token of."""

    seconds: float = 0.0
    free_at: float = 0.0
    """When all of it should be done."""
    last_start: float = 0.0
    number: int = 0
    """The worker's in the index."""
    turn: int = 0
    """When it was last chosen."""


class KvRouter:
    """Estimates for each worker the seconds to a first token:

        queue + prefill_seconds_per_token * (prompt - cached) + sum over tiers of load_seconds_per_token * tokens there

    The queue is what this router placed itself and, where all seats are taken, the wait for one. `started` and `ended` tell
    how it went; rates are learned from that. A tenant's prompt is matched under its own salt alone.
    """

    def __init__(self, index: KvIndex, clock: Clock, rates: WorkerRates | None = None) -> None:
        self._index = index
        self._clock = clock
        self.rates = rates or WorkerRates()
        self._placed: dict[str, _Placed] = {}
        self._queues: dict[str, _Queue] = {}
        self._names: list[str] = []
        """Workers in the order they were last given in; the lists below go by place in it."""
        self._arranged: list[_Queue] = []
        self._prefill: list[float] = []
        self._least = 0.0
        self._learned = 0.0
        self._places: dict[int, int] = {}
        """Of a worker's number in the index."""
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad]) -> str:
        names = [worker.name for worker in workers]
        if names != self._names:
            self._arrange(names)
        now = self._clock.now()
        if now - self._learned >= LEARN_SECONDS:
            self._learn(now)
        match = self._index.match(prompt.ids, prompt.salt)
        count, least = len(prompt.ids), self._least
        best, place, have = math.inf, 0, 0
        # Most cached first: no worker of a group can do better than prefill alone at the best rate there is
        for tokens, numbers in match.groups:
            if least * (count - tokens) > best:
                break
            cost, at = self._best(numbers, workers, count - tokens, now, match.lower)
            if cost < best:
                best, place, have = cost, at, tokens
        if least * count <= best:
            cost, at = self._best(tuple(self._places), workers, count, now, {})
            if cost < best:
                best, place, have = cost, at, 0
        self._turn += 1
        self._arranged[place].turn = self._turn
        if prompt.request_id:
            self._place(prompt.request_id, place, count - have, now, match.lower if have else {})
        return names[place]

    def started(self, request_id: str) -> None:
        """Its first token is there."""
        placed = self._placed.get(request_id)
        if placed is None or placed.started is not None:
            return
        now = placed.started = self._clock.now()
        queue = self._queues[placed.worker]
        self.rates.prefilled(placed.worker, placed.tokens, now - max(placed.since, queue.last_start))
        queue.last_start = now
        self._unqueue(placed, now)

    def ended(self, request_id: str) -> None:
        """It is finished, was cancelled, or will be chosen a worker for again."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        now = self._clock.now()
        if placed.started is None:
            self._unqueue(placed, now)
        else:
            self.rates.stayed(placed.worker, now - placed.since)

    def _best(
        self, numbers: Sequence[int], workers: Sequence[WorkerLoad], uncached: int, now: float, lower: Lower
    ) -> tuple[float, int]:
        """Least seconds and whose place; of equals whoever was chosen longest ago. Of many, the first that is good enough, or
        the best of `MOST`, beginning elsewhere each time."""
        best, best_at, best_turn, enough = math.inf, 0, 0, -math.inf
        if len(numbers) > MANY:
            start, enough = self._turn * STRIDE % len(numbers), self._least * uncached + GOOD_SECONDS
            numbers = (*numbers[start : start + MOST], *numbers[: max(0, min(start, start + MOST - len(numbers)))])
        places, queues, prefill = self._places, self._arranged, self._prefill
        for number in numbers:
            at = places.get(number)
            if at is None:  # it has the blocks, and may not be chosen now
                continue
            queue, worker = queues[at], workers[at]
            share = worker.assigned / worker.seats
            cost = prefill[at] * uncached + SPREAD_SECONDS * share
            if queue.free_at > now:
                cost += queue.free_at - now
            if share >= 1.0:  # those before it, and one more, must leave
                cost += (worker.assigned - worker.seats + 1) * self.rates.stay(worker.name) / worker.seats
            if lower and number in lower:
                cost += self._loading(lower[number])
            if cost < best or (cost == best and queue.turn < best_turn):
                best, best_at, best_turn = cost, at, queue.turn
                if best <= enough:
                    break
        return best, best_at

    def _loading(self, shares: Sequence[int]) -> float:
        return sum(self.rates.load(tier) * tokens for tier, tokens in zip(TIERS, shares, strict=True))

    def _arrange(self, names: list[str]) -> None:
        busy = {placed.worker for placed in self._placed.values()}
        for gone in set(self._queues) - set(names) - busy:
            del self._queues[gone]
            self.rates.forget(gone)
        self._names = names
        self._arranged = [self._queues.setdefault(name, _Queue()) for name in names]
        self._learn(self._clock.now())
        for name, queue in zip(names, self._arranged, strict=True):
            queue.number = self._index.number(name)
        self._places = {queue.number: at for at, queue in enumerate(self._arranged)}

    def _learn(self, now: float) -> None:
        """All rates at once, since who was not measured is taken to be like the others."""
        self._prefill = [self.rates.prefill(name) for name in self._names]
        self._least, self._learned = min(self._prefill), now

    def _place(self, request_id: str, at: int, tokens: int, now: float, lower: Lower) -> None:
        name, queue = self._names[at], self._arranged[at]
        loading = self._loading(lower[queue.number]) if queue.number in lower else 0.0
        seconds = self._prefill[at] * tokens + loading
        self._placed[request_id] = _Placed(name, tokens, seconds, now)
        queue.seconds += seconds
        queue.free_at = max(now, queue.free_at) + seconds

    def _unqueue(self, placed: _Placed, now: float) -> None:
        queue = self._queues[placed.worker]
        queue.seconds = max(0.0, queue.seconds - placed.seconds)
        queue.free_at = now + queue.seconds
