"""Four workers whose caches hold 3 of 8 system prompts each, in simulated time, under two routers."""

import heapq
import random
import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.kv_index import KvIndex
from paceline.cluster.kv_router import KvRouter
from paceline.cluster.router import Prompt, RoundRobin, Router, WorkerLoad
from paceline.core.clock import VirtualClock
from paceline.core.kv_events import BlocksRemoved, BlocksStored
from paceline.kv.prefix_sums import PrefixSums

SECONDS_PER_TOKEN, DECODE_SECONDS, HELD = 1e-3, 0.5, 3
SYSTEM = 1504
PROMPTS = [[1000 * number + i % 997 for i in range(SYSTEM)] for number in range(8)]


@dataclass
class Outcome:
    first_tokens: list[float]
    hits: int

    @property
    def median(self) -> float:
        return statistics.median(self.first_tokens)

    @property
    def late(self) -> float:
        return statistics.quantiles(self.first_tokens, n=100)[98]


class Worker:
    """Prefills one request after the other; remembers the system prompts it used last."""

    def __init__(self, name: str, index: KvIndex) -> None:
        self.name = name
        self.assigned = 0
        self.free_at = 0.0
        self._index = index
        self._held: OrderedDict[int, None] = OrderedDict()

    def prefill(self, number: int, ids: Sequence[int], now: float) -> tuple[float, bool]:
        """When its first token is there, and whether it was a hit."""
        hit = number in self._held
        self.free_at = max(self.free_at, now) + SECONDS_PER_TOKEN * (len(ids) - SYSTEM * hit)
        return self.free_at, hit

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


def simulate(router: Router, index: KvIndex, clock: VirtualClock, count: int = 400, rate: float = 2.0) -> Outcome:
    generator = random.Random(11)
    workers = {f"w{i}": Worker(f"w{i}", index) for i in range(4)}
    outcome, events, arrival = Outcome([], 0), [], 0.0
    for i in range(count):
        arrival += generator.expovariate(rate)
        heapq.heappush(events, (arrival, i, "arrives", generator.randrange(8), ""))
    while events:
        now, i, what, number, name = heapq.heappop(events)
        clock.advance(now - clock.now())
        if what == "arrives":
            ids = PROMPTS[number] + [generator.randrange(50_000) for _ in range(60)]
            name = router.choose(
                Prompt(ids, request_id=f"{i}"), [WorkerLoad(w.name, w.assigned, 32) for w in workers.values()]
            )
            workers[name].assigned += 1
            ready, hit = workers[name].prefill(number, ids, now)
            outcome.first_tokens.append(ready - now)
            outcome.hits += hit
            heapq.heappush(events, (ready, i, "starts", number, name))
        elif what == "starts":
            router.started(f"{i}")
            workers[name].cache(number)
            heapq.heappush(events, (now + DECODE_SECONDS, i, "ends", number, name))
        else:
            router.ended(f"{i}")
            workers[name].assigned -= 1
    return outcome


def outcome(kv_aware: bool) -> Outcome:
    clock, index = VirtualClock(), KvIndex(PrefixSums(seed=1))
    return simulate(KvRouter(index, clock) if kv_aware else RoundRobin(), index, clock)


def test_knowing_the_caches_is_worth_it() -> None:
    aware, blind = outcome(True), outcome(False)
    assert aware.hits / 400 > 0.9
    assert blind.hits / 400 < 0.6
    assert blind.median > 3 * aware.median
    assert blind.late > 1.2 * aware.late
