"""Targets that take from each other what they have cached: real sockets, tiny engines, the same text."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.cluster.routing.kv_index import PeerHint
from paceline.cluster.routing.router import RoundRobin
from paceline.core.cluster_config import ClusterConfig
from paceline.core.output import StepOutput
from paceline.core.pool_config import PoolConfig
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.handoff import handoffs
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.peer_book import IDLE_SECONDS, PeerBook
from paceline.runtime.handoff.prefill_service import PrefillDesk
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.wire.stream_messages import TO_TARGET_WORKER, PrefillStarted
from tests.engine.harness import GREEDY, SAMPLED, assert_nothing_held, engine_of, outputs_of, request, tokens_of
from tests.engine.tiered import tiered
from tests.runtime.target_harness import PATIENT, Deaf, Heard, Members, Running, until

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))
TOKENS = 192
"""Of its full blocks."""


class Peer(Running):
    def __init__(self, name: str, engine: Engine | None = None) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.engine.tokenizer = self.engine.tokenizer or engine_of(tokenizer=True).tokenizer
        self.gate = None
        self.listener = Deaf("tcp://127.0.0.1:0", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.handoffs = Handoffs(loop, threshold=40, health=PATIENT)
        self.desk = PrefillDesk(loop, TransferServer("127.0.0.1", None), computes=False)
        self.publisher = KvPublisher("tcp://127.0.0.1:0", f"{name}@1")
        self.worker = TargetWorker(
            name, loop, self.listener, publisher=self.publisher, handoffs=self.handoffs, desk=self.desk
        )
        self._start()

    def knows(self, other: "Peer") -> None:
        until(lambda: self.handoffs._lines.peer(other.worker.name) is not None)

    def takes(self, one: Request, hint: PeerHint) -> list[StepOutput]:
        """As if a gateway had told it so."""
        events: SimpleQueue[Any] = SimpleQueue()
        self.handoffs.submit(one, events.put, hint)
        heard = [events.get(timeout=30)]
        while heard[-1].finish_reason is None:
            heard.append(events.get(timeout=30))
        return heard


@contextmanager
def peers(*workers: Peer) -> Iterator[TargetPool]:
    """Requests go to one after the other, whoever has what."""
    config = ClusterConfig(
        (PoolConfig("target", "target", "tiny", replicas=len(workers)),), health=PATIENT, router="kv_aware"
    )
    pool = TargetPool(config, Members(*workers))
    try:
        pool._streams._router = RoundRobin()
        until(lambda: sum(line.is_usable for line in pool.lines().values()) == len(workers))
        for worker in workers:
            for other in workers:
                if other is not worker:
                    worker.knows(other)
        yield pool
    finally:
        pool.close()
        for worker in workers:
            worker.stop()


def all_back(*workers: Peer) -> None:
    for worker in workers:
        tables = worker.engine.scheduler.tables
        until(lambda tables=tables: tables.pool.num_free == tables.pool.num_blocks)  # type: ignore[misc]
        assert_nothing_held(worker.engine)
        until(lambda desk=worker.desk: desk._jobs == {})  # type: ignore[misc]


def plain(one: Request) -> list[int]:
    return tokens_of(outputs_of(engine_of(tokenizer=True), one), one.id)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_the_second_worker_takes_what_the_first_has(sampling: dict[str, Any]) -> None:
    a, b = Peer("a"), Peer("b")
    first, second = request("first", LONG, **sampling), request("second", (*LONG, 1, 2, 3), **sampling)
    with peers(a, b) as pool:
        assert tokens_of(Heard(pool, first).all(), "first") == plain(first)
        until(lambda: pool._caches.index.num_blocks("a") >= TOKENS // 16)
        steps = a.engine.num_steps
        heard = Heard(pool, second).all()
        assert tokens_of(heard, "second") == plain(second)
        assert heard[0].num_cached == TOKENS
        record = b.handoffs.record()
        assert (record.done, record.failed, record.tokens, record.peer_tokens) == (1, 0, TOKENS, TOKENS)
        assert a.engine.num_steps == steps  # it computed nothing for it
        all_back(a, b)
        assert len(b.engine.scheduler.tables.find(LONG, "")[0]) == TOKENS // 16


def test_what_is_gone_is_computed_here() -> None:
    a, b = Peer("a"), Peer("b")
    one = request("r", LONG, **SAMPLED)
    with peers(a, b):
        assert tokens_of(b.takes(one, PeerHint("a", TOKENS))) == plain(one)
        assert (b.handoffs.record().done, b.handoffs.record().failed) == (0, 1)
        all_back(a, b)


def test_a_peer_with_other_weights_gives_nothing() -> None:
    """As while a model is replaced, worker by worker."""
    old, new = engine_of(tokenizer=True), engine_of(tokenizer=True)
    old.runner.identity, new.runner.identity = "old", "new"
    a, b = Peer("a", old), Peer("b", new)
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        Heard(pool, one).all()
        assert tokens_of(b.takes(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert (b.handoffs.record().done, b.handoffs.record().failed) == (0, 1)


def test_a_tenant_gets_nothing_of_anothers_whatever_it_is_told() -> None:
    a, b = Peer("a"), Peer("b")
    one = replace(request("r", LONG, **SAMPLED), cache_salt="alice")
    with peers(a, b) as pool:
        Heard(pool, one).all()
        heard = b.takes(replace(one, id="s", cache_salt="bob"), PeerHint("a", TOKENS))
        assert tokens_of(heard, "s") == plain(one)
        assert b.handoffs.record().done == 0
        assert tokens_of(b.takes(replace(one, id="t"), PeerHint("a", TOKENS)), "t") == plain(one)
        # After the failure it is left alone for a moment
        assert b.handoffs.record().done <= 1


def test_a_peer_that_does_not_answer_costs_no_more_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoffs, "PEER_SECONDS", 0.2)
    a, b = Peer("a"), Peer("b")
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        Heard(pool, one).all()
        a.listener.lose = lambda message: isinstance(message, PrefillStarted)
        assert tokens_of(b.takes(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert b.handoffs.record().failed == 1
        all_back(a, b)


def test_what_lies_in_ones_own_lower_tiers_is_not_asked_for() -> None:
    a, b = Peer("a"), Peer("b", tiered(slots=64))
    one = request("r", LONG, **SAMPLED)
    with peers(a, b) as pool:
        Heard(pool, one).all()
        b.takes(replace(one, id="own"), PeerHint("a", 0))  # computes it
        for i in range(3):  # and loses it to its host tier
            b.takes(request(f"other {i}", [(i + j * j) % 40 for j in range(200)]), PeerHint("a", 0))
        assert b.engine.scheduler.tables.find(LONG, "")[0] == []
        assert tokens_of(b.takes(replace(one, id="s"), PeerHint("a", TOKENS)), "s") == plain(one)
        assert b.handoffs.record().done == 0
        tiers = b.engine.snapshot().tiers
        assert tiers is not None
        assert tiers.host_hits >= TOKENS


def test_lines_are_kept_to_those_who_were_needed() -> None:
    book = PeerBook()
    members = {name: Member(name, "target", "target", f"tcp://{name}") for name in "abc"}
    book.need("a", 0.0)
    assert book.lines(0.0) == {}
    book.meet(members)
    book.need("b", IDLE_SECONDS / 2)
    assert set(book.lines(IDLE_SECONDS / 2)) == {"a", "b"}
    assert set(book.lines(IDLE_SECONDS)) == {"b"}
    book.meet({"c": members["c"]})
    assert book.lines(IDLE_SECONDS) == {}
