"""vLLM servers of two formats feed the index over real sockets, and vLLM's tools read the events of workers."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import RoutedPrompt, WorkerLoad
from paceline.targets.caches import POLL_SECONDS, CacheTracker
from paceline.wire.kv_events import encode, short_key
from paceline.wire.kv_subscriber import REPLAY_SECONDS
from tests.processes import vllm_server
from tests.processes.vllm_server import Encoding, VllmServer

PROMPT, OTHER = list(range(500, 660)), list(range(900, 1060))
NAMES = ("vllm-0", "vllm-1")


class Cluster:
    """Two vLLM servers, and a router that tracks them."""

    def __init__(self, encoding: Encoding, replay: bool = True) -> None:
        self.clock = VirtualClock(50.0)
        self.servers = {name: VllmServer(encoding) for name in NAMES}
        self.caches = CacheTracker(None, self.clock)
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
            self.step()

    def step(self) -> None:
        for server in self.servers.values():
            server.reply()
        self.clock.advance(POLL_SECONDS)
        self.caches.receive()

    def has(self, name: str, blocks: int) -> bool:
        return self.caches.index.num_blocks(name) == blocks

    def choose(self, ids: list[int], salt: str = "") -> set[str]:
        """The workers chosen in four calls."""
        loads = [WorkerLoad(name, 0, 8) for name in NAMES]
        return {self.router.choose(RoutedPrompt(ids, salt), loads) for _ in range(4)}

    def close(self) -> None:
        self.caches.close()
        for server in self.servers.values():
            server.close()


@pytest.fixture(params=["maps", "arrays"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    cluster = Cluster(request.param)
    yield cluster
    cluster.close()


def test_requests_go_to_the_server_with_their_prefix(cluster: Cluster) -> None:
    cluster.servers["vllm-0"].store(PROMPT)
    cluster.servers["vllm-1"].store(OTHER[:80])
    cluster.servers["vllm-1"].store(OTHER, start=80)
    cluster.until(lambda: cluster.has("vllm-0", 10) and cluster.has("vllm-1", 10))
    assert cluster.choose([*PROMPT, 1, 2]) == {"vllm-0"}
    assert cluster.choose([*OTHER, 1, 2]) == {"vllm-1"}
    assert cluster.choose(list(range(160))) == set(NAMES)


def test_blocks_after_an_evicted_one_do_not_count(cluster: Cluster) -> None:
    cluster.servers["vllm-0"].store(PROMPT)
    cluster.servers["vllm-1"].store(PROMPT[:48])
    cluster.until(lambda: cluster.has("vllm-0", 10) and cluster.has("vllm-1", 3))
    assert cluster.choose(PROMPT) == {"vllm-0"}
    cluster.servers["vllm-0"].remove(PROMPT[:32])  # eight later blocks stay and cannot be hit
    cluster.until(lambda: cluster.has("vllm-0", 9))
    assert cluster.choose(PROMPT) == {"vllm-1"}
    cluster.servers["vllm-0"].store(PROMPT[:32])
    cluster.until(lambda: cluster.has("vllm-0", 10))
    assert cluster.choose(PROMPT) == {"vllm-0"}
    cluster.servers["vllm-0"].clear()
    cluster.until(lambda: cluster.has("vllm-0", 0))
    assert cluster.choose(PROMPT) == {"vllm-1"}


def test_missed_batches_are_replayed(cluster: Cluster) -> None:
    server = cluster.servers["vllm-0"]
    server.store(PROMPT[:32])
    cluster.until(lambda: cluster.has("vllm-0", 2))
    server.store(PROMPT[:64], start=32, is_sent=False)
    server.store(PROMPT[:96], start=64, is_sent=False)
    server.remove(PROMPT[:96], is_sent=False)
    server.store(OTHER)
    cluster.until(lambda: cluster.has("vllm-0", 2 + 2 + 2 - 1 + 10))
    assert cluster.caches.index.num_orphans == 0
    assert cluster.caches.index.match(PROMPT).groups == [(80, (cluster.caches.index.number("vllm-0"),))]


def test_a_late_router_gets_the_kept_batches(cluster: Cluster) -> None:
    server = cluster.servers["vllm-0"]
    server.store(PROMPT)
    server.store([*PROMPT, *OTHER], start=160)
    second = CacheTracker(None, cluster.clock)
    second.watch("vllm-0", server.address, server.replay_address)
    cluster.until(lambda: (second.receive(), second.index.num_blocks("vllm-0"))[1] == 20)
    second.close()


def test_a_restarted_server_counts_as_empty(cluster: Cluster) -> None:
    server = cluster.servers["vllm-0"]
    for i in range(5):
        server.store([*PROMPT, *[i] * 16], start=160 if i else 0)
    cluster.until(lambda: cluster.has("vllm-0", 15))
    server.restart()
    cluster.until(lambda: server.pub.poll(0) != 0)  # the subscription is renewed at the next receive
    server.store(OTHER)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    assert cluster.choose(PROMPT) == set(NAMES)
    assert cluster.choose(OTHER) == {"vllm-0"}


def test_tenants_of_vllm_are_separate(cluster: Cluster) -> None:
    """Only the first block has the salt: its whole chain belongs to that tenant."""
    server = cluster.servers["vllm-0"]
    server.store(PROMPT[:80], salt="red")
    server.store(PROMPT, salt="red", start=80)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    assert cluster.choose(PROMPT, "red") == {"vllm-0"}
    assert cluster.choose(PROMPT, "blue") == set(NAMES)
    assert cluster.choose(PROMPT) == set(NAMES)


def test_larger_blocks_are_matched_as_blocks_of_16(cluster: Cluster) -> None:
    cluster.servers["vllm-0"].store(PROMPT, size=32)
    cluster.until(lambda: cluster.has("vllm-0", 5))
    number = cluster.caches.index.number("vllm-0")
    assert cluster.caches.index.match(PROMPT[:100]).groups == [(96, (number,))]


@pytest.mark.parametrize("encoding", ["maps", "arrays"])
def test_without_a_replay_socket_a_lost_batch_clears_the_cache(encoding: Encoding) -> None:
    cluster = Cluster(encoding, replay=False)
    server = cluster.servers["vllm-0"]
    server.store(PROMPT)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    server.remove(PROMPT, is_sent=False)
    server.store(OTHER[:32])
    cluster.until(lambda: cluster.has("vllm-0", 2))
    assert cluster.choose(PROMPT) == set(NAMES)
    cluster.close()


def test_a_server_that_never_replies_times_out() -> None:
    cluster = Cluster("maps")
    server = cluster.servers["vllm-0"]
    server.reply = lambda: None  # type: ignore[method-assign]
    server.store(PROMPT[:16], is_sent=False)
    server.store(OTHER)
    cluster.until(lambda: cluster.is_behind)
    cluster.clock.advance(REPLAY_SECONDS + 0.1)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    cluster.close()


def test_watching_another_address_replaces_the_subscription(cluster: Cluster) -> None:
    cluster.servers["vllm-0"].store(PROMPT)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    other = cluster.servers["vllm-1"]
    cluster.caches.watch("vllm-0", other.address, other.replay_address)
    assert cluster.has("vllm-0", 0)
    other.store(OTHER)
    cluster.until(lambda: cluster.has("vllm-0", 10))
    assert cluster.choose(PROMPT) == set(NAMES)


def test_the_example_in_the_documentation_runs(cluster: Cluster) -> None:
    lines = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8").splitlines()
    start = lines.index("    from paceline.core.clock import WallClock")
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    code = dedent("\n".join(lines[start:end]))
    for i, server in enumerate(cluster.servers.values(), start=1):
        for port, address in ((5557, server.address), (5558, server.replay_address)):
            code = code.replace(f"tcp://10.0.0.{i}:{port}", address)
    assert "10.0.0" not in code
    example: dict[str, Any] = {}
    exec(code, example)
    cluster.servers["vllm-1"].store(PROMPT)
    cluster.until(lambda: (example["caches"].receive(), example["caches"].index.num_blocks("vllm-1"))[1] == 10)
    assert [example["choose"](f"{i}", [*PROMPT, i], dict.fromkeys(NAMES, 3)) for i in range(3)] == ["vllm-1"] * 3
    example["caches"].close()


def test_vllms_tools_read_the_events_of_workers() -> None:
    """vLLM's decoder requires an array as batch, and all fields without a default."""
    keys = [bytes([i]) * 32 for i in range(3)]
    events = [
        BlocksStored(keys[:2], None, PROMPT[:32], "red"),
        BlocksStored([keys[2]], keys[1], PROMPT[32:48], tier="disk"),
        BlocksRemoved([keys[2]], "host"),
        CacheCleared(),
    ]
    read = msgspec.msgpack.Decoder(vllm_server.TypedBatch).decode(encode(events, now=7.5))
    first, second, third = map(short_key, keys)
    assert read.ts == 7.5
    assert read.events == [
        vllm_server.BlockStored([first, second], None, PROMPT[:32], 16, None, "GPU", None, [("red",), None]),
        vllm_server.BlockStored([third], second, PROMPT[32:48], 16, None, "STORAGE", None),
        vllm_server.BlockRemoved([third], "CPU"),
        vllm_server.AllBlocksCleared(),
    ]
