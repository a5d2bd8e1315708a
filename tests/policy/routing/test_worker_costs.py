import random
from collections.abc import Sequence

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored
from paceline.kv.prefix import PrefixSums
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad, WorkerTable
from tests.policy.routing.plain_router import PlainRouter


class Traffic:
    """Random requests, KV events and changes of workers; every decision is compared with that of the plain search."""

    def __init__(self, seed: int, num_workers: int, shares_caches: bool, has_table: bool) -> None:
        self.dice, self.clock = random.Random(seed), VirtualClock(10.0)
        self.index = KvIndex(PrefixSums(seed=1))
        self.fast = KvRouter(self.index, self.clock, shares_caches)
        self.plain = PlainRouter(self.index, self.clock, shares_caches)
        self.has_table, self.table = has_table, WorkerTable()
        self.loads: dict[str, WorkerLoad] = {}
        self.running: dict[str, int] = {}
        """Prompt tokens by request."""
        self.stored: dict[str, set[tuple[int, ...]]] = {}
        self.number = 0
        for i in range(num_workers):
            self.set_load(WorkerLoad(f"w{i}", 0, 8, 0.0, 4096))

    def set_load(self, load: WorkerLoad) -> None:
        self.loads[load.name] = load
        self.table.set(load)

    def remove(self, name: str) -> None:
        del self.loads[name]
        self.table.remove(name)

    def ids(self) -> list[int]:
        """Few first blocks, so that prompts share prefixes."""
        blocks = [self.dice.randrange(3) for _ in range(self.dice.randrange(1, 12))]
        return [block * 16 + i for block in blocks for i in range(16)] + [7] * self.dice.randrange(200)

    def decide(self) -> tuple[str, str]:
        self.number += 1
        ids, request_id = self.ids(), f"{self.number}" if self.dice.random() < 0.9 else ""
        prompt = RoutedPrompt(ids, self.dice.choice(("", "", "red")), request_id)
        loads: Sequence[WorkerLoad] = list(self.loads.values())
        chosen = self.fast.choose(prompt, self.table if self.has_table else loads), self.plain.choose(prompt, loads)
        if request_id:
            self.running[request_id] = len(ids)
        if self.dice.random() < 0.7:
            load = self.loads[chosen[1]]
            self.set_load(WorkerLoad(load.name, load.assigned + 1, load.max_num_seqs, 0.0, load.kv_tokens))
        return chosen

    def change(self) -> None:
        dice, name = self.dice, self.dice.choice(list(self.loads))
        match dice.randrange(7):
            case 0:
                self.clock.advance(dice.choice((0.001, 0.05, 0.3)))
            case 1:
                limit = dice.choice((8, 8, 16))
                self.set_load(WorkerLoad(name, dice.randrange(12), limit, 0.0, dice.choice((0, 4096))))
            case 2:
                ids = self.ids()
                ids = ids[: len(ids) // 16 * 16]
                keys = [tuple(ids[: i + 16]) for i in range(0, len(ids), 16)]
                held = self.stored.setdefault(name, set())
                self.index.apply(name, BlocksStored(keys, None, ids, tier=dice.choice((TIERS[0], *TIERS[:2]))))
                held.update(keys)
            case 3 if self.stored.get(name):
                key = dice.choice(sorted(self.stored[name]))
                self.index.apply(name, BlocksRemoved([key], dice.choice(TIERS[:2])))
            case 4 | 5 if self.running:
                request_id = dice.choice(list(self.running))
                cached = dice.randrange(self.running[request_id])
                for router in (self.fast, self.plain):
                    router.started(request_id, cached)
                if dice.random() < 0.6:
                    del self.running[request_id]
                    for router in (self.fast, self.plain):
                        router.ended(request_id)
            case 6 if dice.random() < 0.1 and len(self.loads) > 2:
                self.remove(name)
                self.set_load(WorkerLoad(f"new{self.number}", 0, 8, 0.0, 4096))


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("shares_caches", [False, True])
@pytest.mark.parametrize("num_workers", [3, 40, 300])
def test_decisions_are_those_of_the_plain_search(num_workers: int, shares_caches: bool, has_table: bool) -> None:
    traffic = Traffic(num_workers, num_workers, shares_caches, has_table)
    for _ in range(300):
        for _ in range(traffic.dice.randrange(4)):
            traffic.change()
        fast, plain = traffic.decide()
        assert fast == plain
    for name in traffic.loads:
        assert traffic.fast.rates.prefill(name, 20.0) == traffic.plain.rates.prefill(name, 20.0)


def test_a_table_names_the_loads_that_were_set() -> None:
    table = WorkerTable()
    for name in "abc":
        table.set(WorkerLoad(name, 0, 8))
    generation = table.generation
    table.take_changes()
    table.set(WorkerLoad("b", 5, 8))
    assert (table.take_changes(), table[1].assigned, table.generation) == ((1,), 5, generation)
    assert table.take_changes() == ()
    table.remove("a")
    table.remove("unknown")
    assert table.generation == generation + 1
    table.set(WorkerLoad("c", 2, 8))
    assert [load.name for load in table] == ["b", "c"]
    assert (table.take_changes(), table.has("a"), table.has("c")) == ((1,), False, True)
