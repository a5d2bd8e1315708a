import random
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.kv_events import BlocksStored, Tier
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.kv_router import REFRESH_SECONDS, KvRouter
from paceline.policy.routing.rates import SECONDS_PER_TOKEN
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad
from paceline.policy.routing.worker_costs import COMPUTE_FACTOR

PROMPT = list(range(1024))
NAMES = ["a", "b", "c", "d"]


class Setup:
    """A router, its index and its clock."""

    def __init__(self) -> None:
        self.clock = VirtualClock(100.0)
        self.index = KvIndex(PrefixSums(seed=1))
        self.router = KvRouter(self.index, self.clock)
        self.loads = {name: WorkerLoad(name, 0, 8) for name in NAMES}

    def cache(self, worker: str, ids: Sequence[int], salt: str = "", tier: Tier = "device") -> None:
        keys = [(salt, tuple(ids[: i + 16])) for i in range(0, len(ids), 16)]
        self.index.apply(worker, BlocksStored(keys, None, ids, salt, tier))

    def load(self, worker: str, assigned: int, max_num_seqs: int = 8) -> None:
        self.loads[worker] = WorkerLoad(worker, assigned, max_num_seqs)

    def choose(self, ids: Sequence[int] = PROMPT, salt: str = "", request_id: str = "") -> str:
        return self.router.choose(RoutedPrompt(ids, salt, request_id), list(self.loads.values()))


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_longest_prefix_wins(setup: Setup) -> None:
    setup.cache("b", PROMPT[:256])
    setup.cache("c", PROMPT[:512])
    assert {setup.choose() for _ in range(5)} == {"c"}


def test_queue_can_outweigh_a_prefix(setup: Setup) -> None:
    setup.cache("c", PROMPT[:512])
    saved = 512 * SECONDS_PER_TOKEN
    other = list(range(50_000, 52_000))
    setup.cache("a", other)  # so that the other prompt is cached at "a" and not at "c"
    setup.loads = {name: setup.loads[name] for name in "c"}
    setup.choose(other, request_id="1")
    setup.loads = {name: WorkerLoad(name, 0, 8) for name in NAMES}
    assert setup.choose() != "c"
    setup.clock.advance(
        2000 * SECONDS_PER_TOKEN - saved + 0.01
    )  # the rest of the queue takes less than the prefix saves
    assert setup.choose() == "c"


def test_ties_spread(setup: Setup) -> None:
    assert Counter(setup.choose() for _ in range(40)) == dict.fromkeys(NAMES, 10)
    for name in "ab":
        setup.cache(name, PROMPT)
    assert Counter(setup.choose() for _ in range(40)) == dict.fromkeys("ab", 20)


def other_prompt(number: int) -> list[int]:
    return [100_000 * (number + 1) + i for i in range(1024)]


def test_requests_in_flight_count(setup: Setup) -> None:
    """A burst, faster than KV events arrive."""
    chosen = [setup.choose(other_prompt(i), request_id=f"{i}") for i in range(8)]
    assert Counter(chosen) == dict.fromkeys(NAMES, 2)


def test_prefix_in_flight_is_reused(setup: Setup) -> None:
    asked = [[*PROMPT, *[i] * 32] for i in range(30)]
    worker = setup.choose(asked[0], request_id="0")
    assert {setup.choose(asked[i], request_id=f"{i}") for i in range(1, 6)} == {worker}
    # Five wait with 32 tokens each. With about ten, computing the prompt on another worker is as fast.
    chosen = [setup.choose(asked[i], request_id=f"{i}") for i in range(6, 30)]
    assert Counter(chosen).most_common(1)[0][1] < 20
    assert setup.choose(other_prompt(1), request_id="other") != worker


def test_prefix_in_flight_is_matched_by_salt(setup: Setup) -> None:
    worker = setup.choose(salt="red", request_id="0")
    setup.clock.advance(100 * SECONDS_PER_TOKEN)
    assert setup.choose(salt="blue", request_id="1") != worker
    assert setup.choose(salt="red", request_id="2") == worker


def test_reservation_ends_with_its_request(setup: Setup) -> None:
    worker = setup.choose(request_id="0")
    setup.clock.advance(0.05)
    assert setup.choose() == worker
    setup.router.ended("0")  # cancelled; KV events report its blocks
    assert {setup.choose() for _ in range(4)} == set(NAMES)


def test_emptier_worker_wins_a_tie(setup: Setup) -> None:
    for name, assigned in zip(NAMES, (3, 1, 2, 3), strict=True):
        setup.load(name, assigned)
    assert {setup.choose() for _ in range(3)} == {"b"}
    setup.load("d", 8, max_num_seqs=100)
    assert setup.choose() == "d"


def test_prompts_go_to_the_worker_where_they_delay_the_fewest_sequences(setup: Setup) -> None:
    """Measured rates differ by chance. A difference that is small beside the sequences it would delay does not count."""
    for name, seconds in zip(NAMES, (0.19, 0.20, 0.21, 0.22), strict=True):
        setup.router.rates.add_prefill(name, 1000, seconds, setup.clock.now())
        setup.router.rates.add_duration(name, 1.0)
    for name, assigned in zip(NAMES, (4, 3, 2, 1), strict=True):
        setup.load(name, assigned)
    assert setup.choose() == "d"


def test_full_worker_costs_the_wait_for_a_free_place(setup: Setup) -> None:
    setup.cache("a", PROMPT)
    setup.load("a", 8)
    setup.router.rates.add_duration("a", 0.1)  # 12.5 ms until a sequence finishes: less than 1,024 tokens take
    assert setup.choose() == "a"
    for _ in range(100):
        setup.router.rates.add_duration("a", 100.0)
    assert setup.choose() != "a"


def test_slow_worker_gets_fewer_requests(setup: Setup) -> None:
    setup.loads = {name: setup.loads[name] for name in "ab"}
    for _ in range(10):
        setup.router.rates.add_prefill("a", 1000, 1.0, setup.clock.now())
        setup.router.rates.add_prefill("b", 1000, 3.0, setup.clock.now())
    chosen = Counter(setup.choose(other_prompt(i), request_id=f"{i}") for i in range(40))
    assert chosen["a"] == pytest.approx(30, abs=1)


def test_slow_worker_is_tried_again(setup: Setup) -> None:
    setup.loads = {name: setup.loads[name] for name in "ab"}
    setup.router.rates.add_prefill("b", 1000, 30.0, setup.clock.now())
    for _ in range(50):
        setup.router.rates.add_prefill("a", 1000, 1.0, setup.clock.now())
    assert {setup.choose(other_prompt(i)) for i in range(8)} == {"a"}
    setup.clock.advance(3600.0)
    assert {setup.choose(other_prompt(i)) for i in range(8)} == {"a", "b"}


def test_running_prefill_raises_the_assumed_rate(setup: Setup) -> None:
    """Without measurements, ten seconds without a token raise the assumed cost of computing."""
    setup.loads = {name: setup.loads[name] for name in "ab"}
    setup.cache("a", PROMPT)
    busy = setup.choose(other_prompt(1), request_id="1")
    setup.choose(other_prompt(2), request_id="2")
    setup.clock.advance(10.0)
    assert setup.router.view(busy).prefill_seconds == pytest.approx(SECONDS_PER_TOKEN)  # as of the last decision
    assert setup.choose() == "a"
    assert setup.router.view(busy).prefill_seconds == pytest.approx(10.0 / 1024)


def test_rate_uses_the_computed_tokens(setup: Setup) -> None:
    setup.loads = {"a": setup.loads["a"]}
    setup.cache("a", PROMPT[:512])
    setup.choose(request_id="1")
    setup.clock.advance(2.0)
    setup.router.started("1", 0)  # it was evicted meanwhile
    assert setup.router.view("a").prefill_seconds == pytest.approx(2.0 / 1024)


def test_short_prompt_does_not_shorten_the_time_of_a_long_one(setup: Setup) -> None:
    setup.loads = {"a": setup.loads["a"]}
    setup.choose(other_prompt(1), request_id="long")
    setup.choose(PROMPT[:40], request_id="short")
    setup.clock.advance(1.9)
    setup.router.started("short", 0)
    setup.clock.advance(0.1)
    setup.router.started("long", 0)
    assert setup.router.view("a").prefill_seconds == pytest.approx(2.0 / 1024)


def test_load_time_is_measured_apart_from_prefill(setup: Setup) -> None:
    setup.loads = {"a": setup.loads["a"]}
    setup.router.rates.add_prefill("a", 1000, 1.0, setup.clock.now())
    setup.cache("a", PROMPT[:512], tier="host")
    setup.choose(request_id="1")
    setup.clock.advance(0.512 + 0.256)
    setup.router.started("1", 512)
    assert setup.router.rates.load("host") == pytest.approx(0.256 / 512)
    assert setup.router.view("a").prefill_seconds == pytest.approx(1e-3)
    setup.router.ended("1")
    setup.choose(request_id="2")
    setup.clock.advance(5.0)
    setup.router.started("2", 0)  # the blocks were invalid: loading is not measured
    assert setup.router.rates.load("host") == pytest.approx(0.256 / 512)


def test_eviction_cost_spreads_new_prompts(setup: Setup) -> None:
    setup.loads = {name: WorkerLoad(name, 0, 8, kv_tokens=3 * 1024) for name in NAMES}
    for name, seconds in zip(NAMES, (1.0, 1.3, 1.3, 1.3), strict=True):
        setup.router.rates.add_prefill(name, 1000, seconds, setup.clock.now())
    chosen = []
    for i in range(8):  # one after the other, without a queue
        chosen.append(setup.choose(other_prompt(i), request_id=f"{i}"))
        setup.clock.advance(1.0)
        setup.router.started(f"{i}", 0)
        setup.router.ended(f"{i}")
        setup.cache(chosen[-1], other_prompt(i))
    assert max(Counter(chosen).values()) <= 3
    assert [setup.choose(other_prompt(i)) for i in range(8)] == chosen
    for name in NAMES:  # free capacity does not outweigh a much slower worker
        setup.router.rates.forget(name)
        setup.router.rates.add_prefill(name, 1000, 1.0 if name == "a" else 9.0, setup.clock.now())
    setup.clock.advance(1.0)
    assert setup.choose(other_prompt(9)) == "a"


def test_view_of_a_worker(setup: Setup) -> None:
    setup.cache("a", PROMPT[:64])
    setup.loads = {"a": setup.loads["a"]}
    setup.choose(request_id="1")
    view = setup.router.view("a")
    assert (view.blocks, view.queue_seconds) == (4, pytest.approx(960 * SECONDS_PER_TOKEN))
    assert setup.router.view("unknown").blocks == 0


def test_rates_are_measured_from_routed_requests(setup: Setup) -> None:
    setup.loads = {"a": setup.loads["a"]}
    for i in range(3):
        setup.choose(request_id=f"{i}")
    for i in range(3):  # in order: each takes half a second, and the last waits for the others
        setup.clock.advance(0.5)
        setup.router.started(f"{i}", 0)
        setup.router.started(f"{i}", 0)
    assert setup.router.rates.prefill("a", setup.clock.now()) == pytest.approx(0.5 / 1024)
    setup.clock.advance(1.0)
    setup.router.ended("0")
    assert setup.router.rates.duration("a") == pytest.approx(2.5)


def test_queue_shrinks_as_requests_start_or_end(setup: Setup) -> None:
    setup.loads = {name: setup.loads[name] for name in "ab"}
    setup.cache("a", PROMPT[:128])
    assert setup.choose(request_id="1") == "a"
    assert setup.choose(other_prompt(2), request_id="2") == "b"
    assert setup.choose(other_prompt(3), request_id="3") == "a"  # 896 tokens are queued there, and 1,024 at the other
    setup.router.ended("3")  # cancelled before its first token
    assert setup.choose(other_prompt(4), request_id="4") == "a"
    setup.clock.advance(0.01)
    setup.router.started("2", 0)
    assert setup.choose(other_prompt(5)) == "b"
    setup.router.ended("3")
    setup.router.ended("never placed")
    setup.router.started("never placed", 0)


def test_lower_tiers_cost_their_load_time(setup: Setup) -> None:
    setup.cache("a", PROMPT, tier="disk")
    setup.cache("b", PROMPT, tier="host")
    assert setup.choose() == "b"
    setup.router.rates.add_load("host", 1000, 1.0)
    assert setup.choose() == "a"
    setup.router.rates.add_load("disk", 1000, 1.0)
    assert setup.choose() in "cd"  # computing is faster


def test_salts_are_isolated(setup: Setup) -> None:
    setup.cache("a", PROMPT, salt="red")
    assert setup.choose(salt="red") == "a"
    assert Counter(setup.choose(salt="blue") for _ in range(8)) == dict.fromkeys(NAMES, 2)
    assert Counter(setup.choose() for _ in range(8)) == dict.fromkeys(NAMES, 2)


def test_workers_may_change_in_any_order(setup: Setup) -> None:
    setup.cache("c", PROMPT)
    setup.cache("d", PROMPT[:512])
    assert setup.choose(request_id="1") == "c"
    del setup.loads["c"]
    assert setup.choose(request_id="2") == "d"
    setup.router.started("1", 1024)
    setup.router.ended("1")
    setup.loads = {name: WorkerLoad(name, 0, 8) for name in reversed([*NAMES, "e"])}
    assert setup.choose() == "c"


def test_a_decision_takes_microseconds() -> None:
    """64 workers, 3,072 shared tokens and 200 others."""
    setup = Setup()
    shared = [i * 7919 % 49_152 for i in range(3072)]
    setup.loads = {f"w{i}": WorkerLoad(f"w{i}", i % 8, 8) for i in range(64)}
    for name in setup.loads:
        setup.index.apply(name, BlocksStored(range(192), None, shared))
    prompt = np.array(shared + list(range(200)), np.int32)
    taken = []
    for _ in range(101):
        started = time.thread_time()  # other processes may use the core
        setup.choose(prompt)  # type: ignore[arg-type]
        taken.append(time.thread_time() - started)
    assert min(taken) < 1e-3


def test_chosen_worker_has_the_least_cost() -> None:
    """The search finds the same cost as a comparison of all workers."""
    generator = random.Random(9)
    setup = Setup()
    names = [f"w{i}" for i in range(12)]
    for name in names:
        setup.cache(name, PROMPT[: 16 * generator.randrange(60)] or PROMPT[:16])
        setup.router.rates.add_prefill(name, 1000, generator.uniform(0.1, 2.0), setup.clock.now())
    now, cached = setup.clock.now(), {}
    for tokens, numbers in setup.index.match(PROMPT).groups:
        cached.update({name: tokens for name in names if setup.index.number(name) in numbers})
    queued = dict.fromkeys(names, 0.0)
    for i in range(200):
        setup.loads = {name: WorkerLoad(name, generator.randrange(8), 8) for name in names}
        rates = setup.router.rates

        def cost(name: str) -> float:
            assigned = setup.loads[name].assigned
            seconds = COMPUTE_FACTOR * rates.prefill(name, now) * (1024 - cached.get(name, 0))  # noqa: B023
            return queued[name] + seconds * (1 + assigned) + 1e-3 * assigned / 8

        best = min(map(cost, names))
        chosen = setup.choose(request_id=f"{i}")
        assert cost(chosen) == pytest.approx(best)
        queued[chosen] += rates.prefill(chosen, now) * (1024 - cached.get(chosen, 0))
        cached[chosen] = 1024  # reserved


def test_many_workers_are_all_used() -> None:
    setup = Setup()
    names = [f"w{i}" for i in range(100)]
    for name in names:
        setup.cache(name, PROMPT)
    setup.loads = {name: WorkerLoad(name, 0, 8) for name in names}
    assert Counter(setup.choose() for _ in range(300)) == dict.fromkeys(names, 3)
    setup.loads = {name: WorkerLoad(name, 0 if name == "w77" else 7, 8) for name in names}
    assert {setup.choose() for _ in range(5)} == {"w77"}
    unknown = list(range(60_000, 61_000))
    assert {setup.choose(unknown) for _ in range(5)} == {"w77"}


def test_search_covers_a_thousand_workers_in_turns() -> None:
    setup = Setup()
    names = [f"w{i}" for i in range(1000)]
    setup.loads = {name: WorkerLoad(name, 0, 8) for name in names}
    assert Counter(setup.choose() for _ in range(2000)) == dict.fromkeys(names, 2)
    setup.loads = {name: WorkerLoad(name, 0 if name == "w777" else 7, 8) for name in names}
    found = [setup.choose() == "w777" for _ in range(1000)]
    assert sum(found) == 256


class Sharing(Setup):
    """Two workers that share caches; "a" holds the whole prompt."""

    def __init__(self, shares_caches: bool = True) -> None:
        super().__init__()
        self.router = KvRouter(self.index, self.clock, shares_caches)
        self.loads = {name: WorkerLoad(name, 0, 8) for name in "ab"}
        for name in "ab":
            self.router.rates.add_prefill(name, 1000, 1.0, self.clock.now())
        self.router.rates.add_duration("a", 1000.0)
        self.cache("a", PROMPT)

    def serve_at_b(self, request_id: str, seconds: float, cached: int) -> None:
        """Serve the prompt at "b" while "a" is full."""
        self.load("a", 8)
        assert self.choose(request_id=request_id) == "b"
        self.load("a", 0)
        self.clock.advance(seconds)
        self.router.started(request_id, cached)
        self.router.ended(request_id)

    @property
    def waits_for_a(self) -> bool:
        """Whether the router prefers a queue of 0.3 seconds at "a" to the other worker."""
        self.clock.advance(REFRESH_SECONDS)
        self.load("b", 8)
        assert self.choose(other_prompt(1)[:300], request_id="queue") == "a"
        self.load("b", 0)
        chosen = self.choose()
        self.router.ended("queue")
        return chosen == "a"


def test_peer_fetch_counts_once_measured() -> None:
    setup = Sharing()
    assert setup.waits_for_a
    setup.serve_at_b("1", 0.1, 1008)
    assert setup.router.rates.peer() == pytest.approx((0.1 - 0.016) / 1008)
    assert setup.router.view("b").prefill_seconds == pytest.approx(1e-3)
    assert not setup.waits_for_a
    for i in range(20):  # the fetches fail, and the prompt is computed
        setup.serve_at_b(f"again {i}", 1.024, 0)
    assert setup.waits_for_a


def test_no_peer_fetch_without_shared_caches() -> None:
    setup = Sharing(shares_caches=False)
    setup.serve_at_b("1", 0.1, 1008)  # another gateway had it computed there
    assert setup.router.rates.peer() is None
    assert setup.waits_for_a
