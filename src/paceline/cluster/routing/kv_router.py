"""The worker that will answer first: least prefill of what is not cached, plus loading what is, plus the queue."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from paceline.cluster.routing.crowding import Crowding
from paceline.cluster.routing.kv_index import BLOCK_SIZE, KvIndex, Match
from paceline.cluster.routing.placed import Placed, measure
from paceline.cluster.routing.prefill_queue import PrefillQueue
from paceline.cluster.routing.reservations import Promises
from paceline.cluster.routing.router import Prompt, WorkerLoad
from paceline.cluster.routing.worker_rates import LEAST_TOKENS, WorkerRates
from paceline.core.clock import Clock
from paceline.core.kv_events import TIERS

Lower = Mapping[int, Sequence[int]]
LEARN_SECONDS = 0.25
"""How old the rates may be that go into a decision."""
SPREAD_SECONDS = 1e-3
"""What a full house costs beyond the queue: of workers that are equally good the emptier is taken."""
WORK = 1.25
"""Computing counts a quarter more than its time, since others wait meanwhile: those who come together with one new prompt wait
for one worker to compute it, instead of having every worker do so."""
CROWD = 1.0
"""And as much again where it takes the place of what is in use: the prompts of many spread over many caches, instead of
crowding where computing is a little faster."""
MANY, MOST = 32, 256
GOOD_SECONDS = 2.5e-4
"""Among more workers than `MANY` that have as much cached, it is enough to be so close to the best there could be, and no more
than `MOST` are looked at."""
STRIDE = 7919
"""A prime: beginnings go around all workers, far from each other."""


@dataclass(slots=True)
class _Worker:
    queue: PrefillQueue = field(default_factory=PrefillQueue)
    crowding: Crowding = field(default_factory=Crowding)
    last_start: float = 0.0
    """Of a prompt that took some computing."""
    number: int = 0
    """In the index."""
    turn: int = 0
    """When it was last chosen."""


@dataclass(frozen=True, slots=True)
class RouterView:
    """What a router goes by, of one worker."""

    blocks: int
    """That it is known to have, in all tiers."""
    prefill_seconds: float
    """To compute one token of a prompt, as measured."""
    queue_seconds: float
    """Until all that was sent there should be computed."""


class KvRouter:
    """Estimates for each worker the seconds to a first token:

        queue + prefill_seconds_per_token * (prompt - cached) + sum over tiers of load_seconds_per_token * tokens there

    where what another worker has is taken from there, if workers do that and are seen to be faster by it, and what has to be
    computed bears a surcharge (`WORK`, `CROWD`), which others pay for. The queue is what this router placed itself and, where
    all seats are taken, the wait for one. Prefixes that are being computed count as cached, behind that queue. `started` and
    `ended` tell how it went; rates are learned from that. A tenant's prompt is matched under its own salt alone.
    """

    def __init__(self, index: KvIndex, clock: Clock, shares_caches: bool = False) -> None:
        """`shares_caches`: workers may take from each other what they have cached."""
        self._index = index
        self._clock = clock
        self._shares_caches = shares_caches
        self.rates = WorkerRates()
        self._placed: dict[str, Placed] = {}
        self._promises = Promises()
        self._workers: dict[str, _Worker] = {}
        self._names: list[str] = []
        """Workers in the order they were last given in; the lists below go by place in it."""
        self._arranged: list[_Worker] = []
        self._prefill: list[float] = []
        """Seconds a token."""
        self._rooms: list[int] = []
        self._work: list[float] = []
        """What computing a token counts: seconds, and the surcharge."""
        self._least = 0.0
        self._peer = math.inf
        """Seconds a token that is taken from another worker; none are, as far as is known."""
        self._learned = 0.0
        self._everybody: tuple[int, ...] = ()
        """Their numbers in the index."""
        self._places: dict[int, int] = {}
        """Of a worker's number in the index."""
        self._turn = 0

    def choose(self, prompt: Prompt, workers: Sequence[WorkerLoad]) -> str:
        names = [worker.name for worker in workers]
        if names != self._names:
            self._arrange(names)
        now = self._clock.now()
        if now - self._learned >= LEARN_SECONDS:
            self._learn(workers, now)
        match = self._index.match(prompt.ids, prompt.salt)
        count, least = len(prompt.ids), self._least
        best, place, have = math.inf, 0, 0
        groups = match.groups
        if self._promises:
            groups = sorted((*groups, *self._promises.match(match.chain, match.root)), key=itemgetter(0), reverse=True)
        reach = self._reach(match) if self._shares_caches else 0
        # Most cached first: no worker of a group can do better than prefill alone at the best rate there is
        for tokens, numbers in (*groups, (0, self._everybody)):
            missing = max(0, reach - tokens)
            if least * (count - tokens - missing) + min(least, self._peer) * missing > best:
                break
            cost, at = self._best(numbers, workers, count - tokens, missing, now, match.lower if tokens else {})
            if cost < best:
                best, place, have = cost, at, tokens
        self._turn += 1
        self._arranged[place].turn = self._turn
        if prompt.request_id:
            self._place(prompt.request_id, place, count, have, max(0, reach - have), now, match)
        return names[place]

    def started(self, request_id: str, cached: int) -> None:
        placed = self._placed.get(request_id)
        if placed is None or placed.has_started:
            return
        placed.has_started, now = True, self._clock.now()
        worker = self._workers[placed.worker]
        worker.queue.remove(request_id, now)
        measure(self.rates, placed, cached, now - max(placed.since, worker.last_start), now)
        if placed.count - cached >= LEAST_TOKENS:
            worker.last_start = now

    def ended(self, request_id: str) -> None:
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self._promises.drop(request_id)
        now = self._clock.now()
        if placed.has_started:
            self.rates.stayed(placed.worker, now - placed.since)
        else:
            self._workers[placed.worker].queue.remove(request_id, now)

    def view(self, worker: str) -> RouterView:
        """From any thread."""
        now, known = self._clock.now(), self._workers.get(worker)
        rate = self.rates.prefill(worker, now)
        return RouterView(self._index.num_blocks(worker), rate, known.queue.seconds(rate, now) if known else 0.0)

    def _reach(self, match: Match) -> int:
        """Tokens that the one has who has most, of those who may be chosen."""
        places = self._places
        return next((tokens for tokens, numbers in match.groups if any(number in places for number in numbers)), 0)

    def _best(
        self,
        numbers: Sequence[int],
        workers: Sequence[WorkerLoad],
        uncached: int,
        missing: int,
        now: float,
        lower: Lower,
    ) -> tuple[float, int]:
        """Least seconds and whose place; of equals whoever was chosen longest ago. Of many, the first that is good enough, or
        the best of `MOST`, beginning elsewhere each time."""
        best, best_at, best_turn, enough = math.inf, 0, 0, -math.inf
        if len(numbers) > MANY:
            start, enough = self._turn * STRIDE % len(numbers), self._least * uncached + GOOD_SECONDS
            numbers = (*numbers[start : start + MOST], *numbers[: max(0, min(start, start + MOST - len(numbers)))])
        places, arranged, prefill, work, peer = self._places, self._arranged, self._prefill, self._work, self._peer
        for number in numbers:
            at = places.get(number)
            if at is None:  # it has the blocks, and may not be chosen now
                continue
            known, worker = arranged[at], workers[at]
            share = worker.assigned / worker.seats
            cost = work[at] * uncached + SPREAD_SECONDS * share
            if missing and peer < work[at]:
                cost -= (work[at] - peer) * missing
            if known.queue:
                cost += known.queue.seconds(prefill[at], now)
            if share >= 1.0:  # those before it, and one more, must leave
                cost += (worker.assigned - worker.seats + 1) * self.rates.stay(worker.name) / worker.seats
            if lower and number in lower:
                cost += self._loading(lower[number])
            if cost < best or (cost == best and known.turn < best_turn):
                best, best_at, best_turn = cost, at, known.turn
                if best <= enough:
                    break
        return best, best_at

    def _loading(self, shares: Sequence[int]) -> float:
        return sum(self.rates.load(tier) * tokens for tier, tokens in zip(TIERS, shares, strict=False))

    def _arrange(self, names: list[str]) -> None:
        busy = {placed.worker for placed in self._placed.values()}
        for gone in set(self._workers) - set(names) - busy:
            del self._workers[gone]
            self.rates.forget(gone)
        self._names = names
        self._arranged = [self._workers.setdefault(name, _Worker()) for name in names]
        self._learned = -math.inf
        for name, known in zip(names, self._arranged, strict=True):
            known.number = self._index.number(name)
        self._places = {known.number: at for at, known in enumerate(self._arranged)}
        self._everybody = tuple(self._places)

    def _learn(self, workers: Sequence[WorkerLoad], now: float) -> None:
        """All rates at once, since who was not measured is taken to be like the others."""
        self.rates.suppose(max((known.queue.least_rate(now) for known in self._arranged), default=0.0))
        self._prefill = [self.rates.prefill(name, now) for name in self._names]
        peer = self.rates.peer()
        self._peer = math.inf if peer is None else peer
        self._rooms, self._work = [worker.kv_tokens for worker in workers], [0.0] * len(workers)
        for at in range(len(workers)):
            self._weigh(at, now)
        self._least, self._learned = min(self._work), now

    def _weigh(self, at: int, now: float) -> None:
        held = self._index.num_blocks(self._names[at], "device") * BLOCK_SIZE
        crowding = self._arranged[at].crowding.share(held, self._rooms[at], now)
        self._work[at] = self._prefill[at] * (WORK + CROWD * crowding)

    def _place(self, request_id: str, at: int, count: int, have: int, missing: int, now: float, match: Match) -> None:
        name, known = self._names[at], self._arranged[at]
        shares = match.lower.get(known.number, ()) if have else ()
        self._placed[request_id] = Placed(name, count, have, missing, shares, now)
        self._promises.add(request_id, known.number, match.chain, match.root)
        fetched = missing if self._peer < self._prefill[at] else 0
        loading = self._loading(shares) + (self._peer * fetched if fetched else 0.0)
        known.queue.add(request_id, count - have - fetched, loading, now)
        known.crowding.add(count - have, now)
        self._weigh(at, now)
