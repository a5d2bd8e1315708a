"""Targets that fetch cached blocks from each other over real sockets, with tiny engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.core.cluster_config import ClusterConfig
from paceline.core.output import StepOutput
from paceline.core.pool_config import PoolConfig
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.policy.routing.kv_index import PeerHint
from paceline.policy.routing.router import RoundRobin
from paceline.targets.pool import TargetPool
from paceline.transfer.memory import DeviceMemory
from paceline.transfer.server import TransferServer
from paceline.wire.gateway_messages import TO_TARGET_WORKER, PrefillStarted
from paceline.wire.kv_events import KvPublisher
from paceline.wire.worker_spec import Member
from paceline.worker.handoff import handoffs
from paceline.worker.handoff.connections import IDLE_SECONDS, RecentPeers
from paceline.worker.handoff.handoffs import Handoffs
from paceline.worker.handoff.service import PrefillService
from tests.engine.harness import GREEDY, SAMPLED, assert_nothing_held, engine_of, outputs_of, request, tokens_of
from tests.engine.tiered import tiered
from tests.processes.target_harness import (
    LENIENT,
    LossyListener,
    Members,
    StreamReader,
    WorkerThread,
    engine_server,
    until,
)
from tests.transfer.fake_memory import FakeMemory, Table

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))
TOKENS = 192
"""Tokens of its full blocks."""


class Peer(WorkerThread):
    def __init__(self, name: str, engine: Engine | None = None, memory: DeviceMemory | None = None) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None
        self.listener = LossyListener("tcp://127.0.0.1:0", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.handoffs = Handoffs(loop, threshold=40, health=LENIENT, memory=memory)
        self.service = PrefillService(loop, TransferServer("127.0.0.1", None), computes=False, memory=memory)
        self.publisher = KvPublisher("tcp://127.0.0.1:0", f"{name}@1")
        self.worker = engine_server(
            name, loop, self.listener, publisher=self.publisher, handoffs=self.handoffs, prefill_service=self.service
        )
        self._start()

    def wait_connected(self, other: "Peer") -> None:
        until(lambda: self.handoffs._connections.peer(other.worker.name) is not None)

    def run_with_hint(self, one: Request, hint: PeerHint) -> list[StepOutput]:
        """Outputs of a request with this hint of a gateway."""
        events: SimpleQueue[Any] = SimpleQueue()
        self.handoffs.submit(one, events.put, hint)
        outputs = [events.get(timeout=30)]
        while outputs[-1].finish_reason is None:
            outputs.append(events.get(timeout=30))
        return outputs


@contextmanager
def peers(*workers: Peer) -> Iterator[TargetPool]:
    """A gateway that routes requests round-robin, whatever the workers have cached."""
    config = ClusterConfig(
        (PoolConfig("target", "target", "tiny", replicas=len(workers)),), health=LENIENT, router="kv_aware"
    )
    pool = TargetPool(config, Members(*workers))
    try:
        pool._streams._router = RoundRobin()
        until(lambda: sum(line.is_usable for line in pool.targets().values()) == len(workers))
        for worker in workers:
            for other in workers:
                if other is not worker:
                    worker.wait_connected(other)
        yield pool
    finally:
        pool.close()
        for worker in workers:
            worker.stop()


def assert_all_released(*workers: Peer) -> None:
    for worker in workers:
        tables = worker.engine.scheduler.tables
        until(lambda tables=tables: tables.pool.num_free == tables.pool.num_blocks)  # type: ignore[misc]
        assert_nothing_held(worker.engine)
        until(lambda service=worker.service: service._jobs == {})  # type: ignore[misc]


def plain(one: Request) -> list[int]:
    return tokens_of(outputs_of(engine_of(tokenizer=True), one), one.id)


def test_the_second_worker_reads_the_blocks_of_the_first_in_place() -> None:
    table: Table = {}
    a, b = Peer("a", memory=FakeMemory(table)), Peer("b", memory=FakeMemory(table))
    first, second = request("first", LONG, **SAMPLED), request("second", (*LONG, 1, 2, 3), **SAMPLED)
    with peers(a, b) as pool:
        assert tokens_of(StreamReader(pool, first).read_all(), "first") == plain(first)
        until(lambda: pool._caches.index.num_blocks("a") >= TOKENS // 16)
        outputs = StreamReader(pool, second).read_all()
        assert tokens_of(outputs, "second") == plain(second)
        counts = b.handoffs.counts()
        assert (counts.done, counts.failed, counts.peer_tokens) == (1, 0, TOKENS)
        assert counts.in_place_bytes == counts.bytes > 0
        assert_all_released(a, b)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_second_worker_fetches_the_blocks_of_the_first(sampling: dict[str, Any]) -> None:
    a, b = Peer("a"), Peer("b")
    first, second = request("first", LONG, **sampling), request("second", (*LONG, 1, 2, 3), **sampling)
    with peers(a, b) as pool:
        assert tokens_of(StreamReader(pool, first).read_all(), "first") == plain(first)
        until(lambda: pool._caches.index.num_blocks("a") >= TOKENS // 16)
        steps = a.engine.num_steps
        outputs = StreamReader(pool, second).read_all()
        assert tokens_of(outputs, "second") == plain(second)
        assert outputs[0].num_cached == TOKENS
        counts = b.handoffs.counts()
        assert (counts.done, counts.failed, counts.tokens, counts.peer_tokens) == (1, 0, TOKENS, TOKENS)
        assert a.engine.num_steps == steps  # the first computed nothing for it
        assert_all_released(a, b)
        assert len(b.engine.scheduler.tables.find(LONG, "")[0]) == TOKENS // 16


def test_blocks_that_were_evicted_are_computed() -> None:
    a, b = Peer("a"), Peer("b")
    one = request("r", LONG, **SAMPLED)
    with peers(a, b):
        assert tokens_of(b.run_with_hint(one, PeerHint("a", TOKENS))) == plain(one)
        assert (b.handoffs.counts().done, b.handoffs.counts().failed) == (0, 1)
        assert_all_released(a, b)


def test_a_peer_with_other_weights_is_refused() -> None:
    """While a model is replaced, worker by worker."""
    old, new = engine_of(tokenizer=True), engine_of(tokenizer=True)
    old.runner.weights_id, new.runner.weights_id = "old", "new"
    a, b = Peer("a", old), Peer("b", new)
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        StreamReader(pool, one).read_all()
        assert tokens_of(b.run_with_hint(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert (b.handoffs.counts().done, b.handoffs.counts().failed) == (0, 1)


def test_a_wrong_hint_gives_a_tenant_no_blocks_of_another() -> None:
    a, b = Peer("a"), Peer("b")
    one = replace(request("r", LONG, **SAMPLED), cache_salt="alice")
    with peers(a, b) as pool:
        StreamReader(pool, one).read_all()
        outputs = b.run_with_hint(replace(one, id="s", cache_salt="bob"), PeerHint("a", TOKENS))
        assert tokens_of(outputs, "s") == plain(one)
        assert b.handoffs.counts().done == 0
        assert tokens_of(b.run_with_hint(replace(one, id="t"), PeerHint("a", TOKENS)), "t") == plain(one)
        # After the failure the peer is excluded for a moment
        assert b.handoffs.counts().done <= 1


def test_a_peer_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "PEER_SECONDS", 0.2)
    a, b = Peer("a"), Peer("b")
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        StreamReader(pool, one).read_all()
        a.listener.lose = lambda message: isinstance(message, PrefillStarted)
        assert tokens_of(b.run_with_hint(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert b.handoffs.counts().failed == 1
        assert_all_released(a, b)


def test_blocks_in_the_own_lower_tiers_are_not_requested() -> None:
    a, b = Peer("a"), Peer("b", tiered(slots=64, tokenizer=True))
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        StreamReader(pool, one).read_all()
        b.run_with_hint(replace(one, id="own"), PeerHint("a", 0))  # b computes it
        for i in range(3):  # and evicts it to its host tier
            b.run_with_hint(request(f"other {i}", [(i + j * j) % 40 for j in range(200)]), PeerHint("a", 0))
        assert b.engine.scheduler.tables.find(LONG, "")[0] == []
        assert tokens_of(b.run_with_hint(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert b.handoffs.counts().done == 0
        tiers = b.engine.status.snapshot().tiers
        assert tiers is not None
        assert tiers.host_hits >= TOKENS


def test_connections_are_kept_to_recently_used_peers() -> None:
    recent = RecentPeers()
    members = {name: Member(name, "target", "target", f"tcp://{name}") for name in "abc"}
    recent.use("a", 0.0)
    assert recent.members(0.0) == {}
    recent.set_members(members)
    recent.use("b", IDLE_SECONDS / 2)
    assert set(recent.members(IDLE_SECONDS / 2)) == {"a", "b"}
    assert set(recent.members(IDLE_SECONDS)) == {"b"}
    recent.set_members({"c": members["c"]})
    assert recent.members(IDLE_SECONDS) == {}
