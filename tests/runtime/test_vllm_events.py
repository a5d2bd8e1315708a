"""Stock vLLM servers, old and new, feed the index over real sockets; and vLLM's tools read our workers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from paceline.cluster.routing.kv_router import KvRouter
from paceline.cluster.routing.router import Prompt, WorkerLoad
from paceline.core.clock import VirtualClock
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from paceline.runtime.kv_events.events import encode, short
from paceline.runtime.kv_events.follower import FRESH_SECONDS, CacheFollower
from paceline.runtime.kv_events.subscriber import REPLAY_SECONDS
from tests.runtime import vllm_server
from tests.runtime.vllm_server import Encoding, Vllm

PROMPT, OTHER = list(range(500, 660)), list(range(900, 1060))
NAMES = ("vllm-0", "vllm-1")


class House:
    """Two vLLM servers, and a router that hears them."""

    def __init__(self, encoding: Encoding, replay: bool = True) -> None:
        self.clock = VirtualClock(50.0)
        self.servers = {name: Vllm(encoding) for name in NAMES}
        self.caches = CacheFollower(None, self.clock)
        self.router = KvRouter(self.caches.index, self.clock)
        for name, server in self.servers.items():
            self.caches.watch(name, server.address, server.replay_address if replay else None)
            server.wait_subscribed()
        self.until(lambda: not self.is_behind)

    @property
    def is_behind(self) -> bool:
        return any(subscriber.is_behind for subscriber in self.caches._subscribers.values())

    def until(self, done: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, {name: self.caches.index.num_blocks(name) for name in NAMES}
            time.sleep(0.002)
            self.look()

    def look(self) -> None:
        for server in self.servers.values():
            server.answer()
        self.clock.advance(FRESH_SECONDS)
        self.caches.receive()

    def has(self, name: str, blocks: int) -> bool:
        return self.caches.index.num_blocks(name) == blocks

    def choose(self, ids: list[int], salt: str = "") -> set[str]:
        """Who is chosen, asked four times."""
        loads = [WorkerLoad(name, 0, 8) for name in NAMES]
        return {self.router.choose(Prompt(ids, salt), loads) for _ in range(4)}

    def close(self) -> None:
        self.caches.close()
        for server in self.servers.values():
            server.close()


@pytest.fixture(params=["maps", "arrays"])
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    house = House(request.param)
    yield house
    house.close()


def test_requests_go_where_vllm_has_their_prefix(house: House) -> None:
    house.servers["vllm-0"].store(PROMPT)
    house.servers["vllm-1"].store(OTHER[:80])
    house.servers["vllm-1"].store(OTHER, start=80)
    house.until(lambda: house.has("vllm-0", 10) and house.has("vllm-1", 10))
    assert house.choose([*PROMPT, 1, 2]) == {"vllm-0"}
    assert house.choose([*OTHER, 1, 2]) == {"vllm-1"}
    assert house.choose(list(range(160))) == set(NAMES)


def test_evictions_count_from_the_block_that_is_gone(house: House) -> None:
    house.servers["vllm-0"].store(PROMPT)
    house.servers["vllm-1"].store(PROMPT[:48])
    house.until(lambda: house.has("vllm-0", 10) and house.has("vllm-1", 3))
    assert house.choose(PROMPT) == {"vllm-0"}
    house.servers["vllm-0"].remove(PROMPT[:32])  # eight more blocks are there, and cannot be hit
    house.until(lambda: house.has("vllm-0", 9))
    assert house.choose(PROMPT) == {"vllm-1"}
    house.servers["vllm-0"].store(PROMPT[:32])
    house.until(lambda: house.has("vllm-0", 10))
    assert house.choose(PROMPT) == {"vllm-0"}
    house.servers["vllm-0"].clear()
    house.until(lambda: house.has("vllm-0", 0))
    assert house.choose(PROMPT) == {"vllm-1"}


def test_missed_batches_are_asked_for(house: House) -> None:
    server = house.servers["vllm-0"]
    server.store(PROMPT[:32])
    house.until(lambda: house.has("vllm-0", 2))
    server.store(PROMPT[:64], start=32, heard=False)
    server.store(PROMPT[:96], start=64, heard=False)
    server.remove(PROMPT[:96], heard=False)
    server.store(OTHER)
    house.until(lambda: house.has("vllm-0", 2 + 2 + 2 - 1 + 10))
    assert house.caches.index.num_orphans == 0
    assert house.caches.index.match(PROMPT).groups == [(80, (house.caches.index.number("vllm-0"),))]


def test_a_router_that_comes_late_hears_what_is_remembered(house: House) -> None:
    server = house.servers["vllm-0"]
    server.store(PROMPT)
    server.store([*PROMPT, *OTHER], start=160)
    late = CacheFollower(None, house.clock)
    late.watch("vllm-0", server.address, server.replay_address)
    house.until(lambda: (late.receive(), late.index.num_blocks("vllm-0"))[1] == 20)
    late.close()


def test_a_server_that_starts_anew_is_known_to_have_nothing(house: House) -> None:
    server = house.servers["vllm-0"]
    for i in range(5):
        server.store([*PROMPT, *[i] * 16], start=160 if i else 0)
    house.until(lambda: house.has("vllm-0", 15))
    server.restart()
    house.until(lambda: server.pub.poll(0) != 0)  # a subscription is renewed when its owner next looks
    server.store(OTHER)
    house.until(lambda: house.has("vllm-0", 10))
    assert house.choose(PROMPT) == set(NAMES)
    assert house.choose(OTHER) == {"vllm-0"}


def test_tenants_of_vllm_are_told_apart(house: House) -> None:
    """The salt is in the first block's extra keys alone: a chain belongs to whoever began it."""
    server = house.servers["vllm-0"]
    server.store(PROMPT[:80], salt="red")
    server.store(PROMPT, salt="red", start=80)
    house.until(lambda: house.has("vllm-0", 10))
    assert house.choose(PROMPT, "red") == {"vllm-0"}
    assert house.choose(PROMPT, "blue") == set(NAMES)
    assert house.choose(PROMPT) == set(NAMES)


def test_larger_blocks_are_matched_in_sixteens(house: House) -> None:
    house.servers["vllm-0"].store(PROMPT, size=32)
    house.until(lambda: house.has("vllm-0", 5))
    number = house.caches.index.number("vllm-0")
    assert house.caches.index.match(PROMPT[:100]).groups == [(96, (number,))]


@pytest.mark.parametrize("encoding", ["maps", "arrays"])
def test_without_its_replay_socket_what_is_missed_makes_all_void(encoding: Encoding) -> None:
    house = House(encoding, replay=False)
    server = house.servers["vllm-0"]
    server.store(PROMPT)
    house.until(lambda: house.has("vllm-0", 10))
    server.remove(PROMPT, heard=False)
    server.store(OTHER[:32])
    house.until(lambda: house.has("vllm-0", 2))
    assert house.choose(PROMPT) == set(NAMES)
    house.close()


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    house = House("maps")
    server = house.servers["vllm-0"]
    server.answer = lambda: None  # type: ignore[method-assign]
    server.store(PROMPT[:16], heard=False)
    server.store(OTHER)
    house.until(lambda: house.is_behind)
    house.clock.advance(REPLAY_SECONDS + 0.1)
    house.until(lambda: house.has("vllm-0", 10))
    house.close()


def test_to_watch_another_address_is_to_forget_the_one_before(house: House) -> None:
    house.servers["vllm-0"].store(PROMPT)
    house.until(lambda: house.has("vllm-0", 10))
    other = house.servers["vllm-1"]
    house.caches.watch("vllm-0", other.address, other.replay_address)
    assert house.has("vllm-0", 0)
    other.store(OTHER)
    house.until(lambda: house.has("vllm-0", 10))
    assert house.choose(PROMPT) == set(NAMES)


def test_the_example_in_the_documentation_runs(house: House) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8").splitlines()
    start = lines.index("    from paceline.cluster.routing.kv_router import KvRouter")
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    code = dedent("\n".join(lines[start:end]))
    for i, server in enumerate(house.servers.values(), start=1):
        for port, address in ((5557, server.address), (5558, server.replay_address)):
            code = code.replace(f"tcp://10.0.0.{i}:{port}", address)
    assert "10.0.0" not in code
    example: dict[str, Any] = {}
    exec(code, example)
    house.servers["vllm-1"].store(PROMPT)
    house.until(lambda: (example["caches"].receive(), example["caches"].index.num_blocks("vllm-1"))[1] == 10)
    assert [example["choose"](f"{i}", [*PROMPT, i], dict.fromkeys(NAMES, 3)) for i in range(3)] == ["vllm-1"] * 3
    example["caches"].close()


def test_vllms_tools_read_what_our_workers_say() -> None:
    """Its decoder is strict about the batch being an array and about which fields are there."""
    keys = [bytes([i]) * 32 for i in range(3)]
    events = [
        BlocksStored(keys[:2], None, PROMPT[:32], "red"),
        BlocksStored([keys[2]], keys[1], PROMPT[32:48], tier="disk"),
        BlocksRemoved([keys[2]], "host"),
        CacheCleared(),
    ]
    read = msgspec.msgpack.Decoder(vllm_server.TypedBatch).decode(encode(events, now=7.5))
    first, second, third = map(short, keys)
    assert read.ts == 7.5
    assert read.events == [
        vllm_server.BlockStored([first, second], None, PROMPT[:32], 16, None, "GPU", None, [("red",), None]),
        vllm_server.BlockStored([third], second, PROMPT[32:48], 16, None, "STORAGE", None),
        vllm_server.BlockRemoved([third], "CPU"),
        vllm_server.AllBlocksCleared(),
    ]
