"""Simulation of two routers: four workers whose caches hold 3 of 8 system prompts each."""

import heapq
import random
import statistics
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.kv_events import BlocksRemoved, BlocksStored
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import RoundRobin, RoutedPrompt, Router, WorkerLoad

SECONDS_PER_TOKEN, DECODE_SECONDS, HELD = 3e-3, 0.5, 3
SYSTEM, QUESTION = 1504, 60
CAPACITY = HELD * SYSTEM + 24 * 16
COLD, WARM = SECONDS_PER_TOKEN * (SYSTEM + QUESTION), SECONDS_PER_TOKEN * QUESTION
PROMPTS = [[1000 * number + i % 997 for i in range(SYSTEM)] for number in range(8)]


@dataclass
class Outcome:
    first_tokens: list[float] = field(default_factory=list)
    hits: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.first_tokens)

    @property
    def late(self) -> float:
        return statistics.quantiles(self.first_tokens, n=100)[98]

    @property
    def hit_rate(self) -> float:
        return self.hits / len(self.first_tokens)


class Worker:
    """Computes prompts in order; caches the system prompts used last."""

    def __init__(self, name: str, index: KvIndex, slowdown: float) -> None:
        self.name = name
        self.assigned = 0
        self.waiting: deque[int] = deque()
        self.computing: int | None = None
        self.slowdown = slowdown
        self._index = index
        self._held: OrderedDict[int, None] = OrderedDict()

    def has(self, number: int) -> bool:
        return number in self._held

    def cache(self, number: int) -> None:
        if number not in self._held:
            self._index.apply(self.name, BlocksStored(_keys(number), None, PROMPTS[number]))
        self._held[number] = None
        self._held.move_to_end(number)
        if len(self._held) > HELD:
            old, _ = self._held.popitem(last=False)
            self._index.apply(self.name, BlocksRemoved(_keys(old)[::-1]))


def _keys(number: int) -> list[tuple[int, int]]:
    return [(number, i) for i in range(SYSTEM // 16)]


class Simulation:
    """`rate` requests per second, in bursts of `burst` with the same system prompt. `noise` varies the time of a prompt."""

    def __init__(
        self,
        kv_aware: bool,
        rate: float,
        burst: int = 1,
        slowdown: tuple[float, ...] = (1, 1, 1, 1),
        noise: float = 0.0,
        seed: int = 11,
    ) -> None:
        self.clock = VirtualClock()
        self.index = KvIndex(PrefixSums(seed=1))
        self.router: Router = KvRouter(self.index, self.clock) if kv_aware else RoundRobin()
        self.workers = {f"w{i}": Worker(f"w{i}", self.index, slow) for i, slow in enumerate(slowdown)}
        self.outcome = Outcome()
        self._random, self._noise = random.Random(seed), noise
        self._rate, self._burst = rate / burst, burst
        self._events: list[tuple[float, int, str, str]] = []
        self._numbers: list[int] = []
        self._arrived: list[float] = []

    def run(self, count: int = 400) -> Outcome:
        arrival = 0.0
        for i in range(count):
            if i % self._burst == 0:
                arrival += self._random.expovariate(self._rate)
                number = self._random.randrange(8)
            self._numbers.append(number)
            self._arrived.append(arrival)
            heapq.heappush(self._events, (arrival, i, "arrives", ""))
        while self._events:
            now, i, what, name = heapq.heappop(self._events)
            self.clock.advance(now - self.clock.now())
            if what == "arrives":
                self._route(i)
            elif what == "starts":
                self._start(i, self.workers[name])
            else:
                self.router.ended(f"{i}")
                self.workers[name].assigned -= 1
        return self.outcome

    def _route(self, i: int) -> None:
        ids = PROMPTS[self._numbers[i]] + [self._random.randrange(50_000) for _ in range(QUESTION)]
        loads = [WorkerLoad(worker.name, worker.assigned, 32, 0.0, CAPACITY) for worker in self.workers.values()]
        worker = self.workers[self.router.choose(RoutedPrompt(ids, request_id=f"{i}"), loads)]
        worker.assigned += 1
        worker.waiting.append(i)
        self._compute(worker)

    def _compute(self, worker: Worker) -> None:
        if worker.computing is None and worker.waiting:
            i = worker.computing = worker.waiting.popleft()
            seconds = (WARM if worker.has(self._numbers[i]) else COLD) * worker.slowdown
            seconds *= self._random.lognormvariate(0.0, self._noise)
            heapq.heappush(self._events, (self.clock.now() + seconds, i, "starts", worker.name))

    def _start(self, i: int, worker: Worker) -> None:
        hit = worker.has(self._numbers[i])
        self.outcome.first_tokens.append(self.clock.now() - self._arrived[i])
        self.outcome.hits += hit
        worker.cache(self._numbers[i])
        worker.computing = None
        self.router.started(f"{i}", SYSTEM * hit)
        heapq.heappush(self._events, (self.clock.now() + DECODE_SECONDS, i, "ends", worker.name))
        self._compute(worker)


def test_kv_router_has_more_hits_and_earlier_first_tokens() -> None:
    aware, blind = Simulation(True, 0.8).run(), Simulation(False, 0.8).run()
    assert aware.hit_rate > 0.95
    assert blind.hit_rate < 0.6
    assert aware.median == pytest.approx(WARM)
    assert blind.median > 20 * aware.median
    assert blind.late > 1.5 * aware.late


def test_kv_router_sustains_a_load_that_overloads_round_robin() -> None:
    """Requests arrive before any measurement; no worker gets too many of them."""
    aware, blind = Simulation(True, 3.0).run(), Simulation(False, 3.0).run()
    assert aware.hit_rate > 0.97
    assert aware.median == pytest.approx(WARM)
    assert aware.late < 2 * COLD < 20 * COLD < blind.late


@pytest.mark.parametrize(("burst", "limit"), [(4, 4 * WARM), (16, 16 * WARM)])
def test_burst_with_one_system_prompt_computes_it_once(burst: int, limit: float) -> None:
    aware, blind = Simulation(True, 1.0, burst).run(), Simulation(False, 1.0, burst).run()
    assert aware.hit_rate > max(0.9, blind.hit_rate)
    assert aware.median < limit
    assert blind.median > COLD


def test_slow_worker_does_not_delay_the_others() -> None:
    aware = Simulation(True, 1.0, slowdown=(1, 1, 1, 4)).run()
    assert aware.median == pytest.approx(WARM)
    assert aware.late < 4 * COLD


def test_noisy_rates_do_not_concentrate_prompts() -> None:
    """With noise, every worker looks faster than the others for a while. Eight prompts fit in four caches of three, so each is
    rarely computed twice."""
    outcomes = [Simulation(True, 0.5, noise=0.5, seed=seed).run(80) for seed in range(10)]
    assert statistics.mean(outcome.hit_rate for outcome in outcomes) > 0.88
    assert min(outcome.hit_rate for outcome in outcomes) > 0.8
