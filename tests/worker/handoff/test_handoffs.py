"""Hand-offs between workers over real sockets, with tiny engines and injected faults."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from msgspec import structs

from paceline.core.output import StepOutput
from paceline.engine.engine import Engine
from paceline.engine.hooks.handoff import CacheLayout, PromptImport
from paceline.engine.loop import EngineLoop
from paceline.kernels.cpu.checksums import crc32
from paceline.policy.health import WorkerState
from paceline.targets.pool import TargetPool
from paceline.transfer.memory import DeviceMemory
from paceline.transfer.server import TransferServer
from paceline.wire.draft_messages import Goodbye
from paceline.wire.gateway_messages import TO_GATEWAY, TO_TARGET_WORKER, Prefill, PrefillStarted
from paceline.wire.transport import Connection
from paceline.wire.worker_spec import Member
from paceline.worker.handoff.handoffs import Handoffs
from paceline.worker.handoff.service import PrefillService
from tests.engine.harness import (
    GREEDY,
    MODEL,
    PROMPT,
    SAMPLED,
    assert_nothing_held,
    engine_of,
    outputs_of,
    request,
    text_of,
    tokens_of,
)
from tests.fakes import tiny_engine, tiny_model
from tests.heads import eagle
from tests.processes.target_harness import (
    LENIENT,
    STRICT,
    Gate,
    LossyListener,
    Members,
    StreamReader,
    WorkerThread,
    cluster,
    engine_server,
    until,
)
from tests.specs import changed

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))
THRESHOLD = 40


class Target(WorkerThread):
    """A decode worker."""

    def __init__(
        self, name: str, engine: Engine | None = None, health: Any = LENIENT, memory: DeviceMemory | None = None
    ) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None
        self.listener = LossyListener("tcp://127.0.0.1:0", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.handoffs = Handoffs(loop, threshold=THRESHOLD, health=health, memory=memory)
        self.worker = engine_server(name, loop, self.listener, handoffs=self.handoffs)
        self._start()


class PrefillWorker(WorkerThread):
    def __init__(
        self,
        name: str,
        engine: Engine | None = None,
        steps: int | None = None,
        port: int = 0,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None if steps is None else Gate(self.engine, steps)
        self.listener = LossyListener(f"tcp://127.0.0.1:{port}", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.service = PrefillService(loop, TransferServer("127.0.0.1", None), memory=memory)
        self.worker = engine_server(name, loop, self.listener, prefill_service=self.service)
        self._start()

    @property
    def member(self) -> Member:
        return Member(self.worker.name, "prefill", "prefill", self.worker.address)


@contextmanager
def split_cluster(*workers: WorkerThread, **options: Any) -> Iterator[TargetPool]:
    """A gateway with these workers. The targets are connected to the prefill workers."""
    pool = TargetPool(cluster(**options), Members(*workers))
    try:
        until(lambda: sum(line.is_usable for line in pool.targets().values()) == len(workers))
        num_prefill = sum(isinstance(worker, PrefillWorker) for worker in workers)
        for worker in workers:
            if isinstance(worker, Target):
                until(lambda handoffs=worker.handoffs: len(handoffs._connections.loads) == num_prefill)  # type: ignore[misc]
        yield pool
    finally:
        pool.close()
        for worker in workers:
            worker.stop()


REQUESTS = [
    request("greedy", LONG, **GREEDY),
    request("seeded", LONG[3:], **SAMPLED),
    request("three", LONG[7:], n=3, **SAMPLED),
    request("text", LONG[9:150], stop=("ab", "cd"), max_tokens=40, **SAMPLED),
    request("short", PROMPT, **SAMPLED),
]


def texts_of(outputs: list[StepOutput]) -> dict[tuple[str, int], tuple[list[int], str]]:
    own = {one.id: [output for output in outputs if output.request_id == one.id] for one in REQUESTS}
    return {
        (one.id, choice): (tokens_of(own[one.id], one.id, choice), text_of(own[one.id], one, choice))
        for one in REQUESTS
        for choice in range(one.sampling.n)
    }


EXPECTED = texts_of([output for one in REQUESTS for output in outputs_of(engine_of(tokenizer=True), one)])


def assert_all_released(*workers: WorkerThread) -> None:
    """No worker holds a block or a job any more."""
    for worker in workers:
        tables = worker.engine.scheduler.tables
        until(lambda tables=tables: tables.pool.num_free == tables.pool.num_blocks)  # type: ignore[misc]
        assert_nothing_held(worker.engine)
        if isinstance(worker, PrefillWorker):
            until(lambda service=worker.service: service._jobs == {})  # type: ignore[misc]


def test_the_text_equals_one_engine_and_long_prompts_are_handed_off() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        for one in REQUESTS:
            outputs = StreamReader(pool, one).read_all()
            assert tokens_of(outputs, one.id) == EXPECTED[one.id, 0][0]
            assert outputs[0].num_cached == 0  # handed-off tokens do not count as cached
        counts = target.handoffs.counts()
        assert (counts.done, counts.failed) == (4, 0)
        assert counts.tokens == 192 + 192 + 176 + 128
        assert counts.seconds > 0
        until(lambda: prefill_worker.service.counts().done == 4)
        assert prefill_worker.service.counts().bytes == counts.bytes
        assert_all_released(target, prefill_worker)


def test_many_requests_between_several_workers() -> None:
    workers = [Target("t0"), Target("t1"), PrefillWorker("p0"), PrefillWorker("p1")]
    with split_cluster(*workers) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert_all_released(*workers)


def test_cached_and_short_prompts_are_not_handed_off() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        StreamReader(pool, REQUESTS[4]).read_all()
        StreamReader(pool, REQUESTS[0]).read_all()
        assert target.handoffs.counts().done == 1
        again = StreamReader(pool, replace(REQUESTS[0], id="again", prompt_ids=(*LONG, 1, 2, 3))).read_all()
        assert again[0].num_cached == 192
        assert target.handoffs.counts().done == 1


def test_tenants_share_no_blocks_on_either_worker() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        for salt in ("a", "b", ""):
            outputs = StreamReader(pool, replace(REQUESTS[0], id=f"salt {salt}", cache_salt=salt)).read_all()
            assert tokens_of(outputs, f"salt {salt}") == EXPECTED["greedy", 0][0]
            assert outputs[0].num_cached == 0
        assert target.handoffs.counts().done == 3
        assert prefill_worker.engine.num_steps == 3 * 3  # 192 tokens in chunks of 64: no prefix hits there


def test_a_draft_head_drafts_as_without_a_hand_off() -> None:
    one = request("r", LONG, **GREEDY)
    expected = outputs_of(engine_of(eagle(MODEL), 6, tokenizer=True), one)
    engine = engine_of(eagle(MODEL), 6, tokenizer=True)
    target, prefill_worker = Target("t", engine), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        outputs = StreamReader(pool, one).read_all()
        assert target.handoffs.counts().done == 1
    assert tokens_of(outputs) == tokens_of(expected)
    assert [(o.drafted, o.accepted) for o in outputs] == [(o.drafted, o.accepted) for o in expected]


def test_a_moved_request_hands_off_its_committed_tokens_too() -> None:
    committed = tuple(EXPECTED["seeded", 0][0][:10])
    target, prefill_worker = Target("t"), PrefillWorker("p")
    with split_cluster(target, prefill_worker):
        events: SimpleQueue[Any] = SimpleQueue()
        target.handoffs.submit(replace(REQUESTS[1], committed=(committed,)), events.put)
        outputs = [events.get(timeout=20)]
        while outputs[-1].finish_reason is None:
            outputs.append(events.get(timeout=20))
        assert target.handoffs.counts().tokens == 192  # of 206
    assert [*committed, *tokens_of(outputs, "seeded")] == EXPECTED["seeded", 0][0]


# Faults


def check_fallback(
    inject_fault: Callable[[Target, PrefillWorker], None], steps: int | None = None, **options: Any
) -> None:
    """Call `inject_fault` when the prefill worker is at its gate: the texts must be the same, and no block held."""
    target, prefill_worker = Target("t", **options), PrefillWorker("p", engine_of(tokenizer=True), steps=steps)
    with split_cluster(target, prefill_worker) as pool:
        stream = StreamReader(pool, *REQUESTS)
        if prefill_worker.gate is not None:
            assert prefill_worker.gate.reached.wait(20)
        inject_fault(target, prefill_worker)
        assert texts_of(stream.read_all()) == EXPECTED
        assert target.handoffs.counts().failed > 0
        assert_all_released(target)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stopped_prefill_worker(steps: int) -> None:
    def stop(target: Target, prefill_worker: PrefillWorker) -> None:
        prefill_worker.worker.stop()
        until(lambda: target.handoffs.counts().failed > 0)  # before the gate opens: it could complete the prompts
        prefill_worker.stop()

    check_fallback(stop, steps)


def test_a_prefill_worker_that_loses_its_network() -> None:
    def cut_network(target: Target, prefill_worker: PrefillWorker) -> None:
        prefill_worker.listener.is_cut = True

    check_fallback(cut_network, 1, health=STRICT)


def test_a_stuck_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.policy.routing.handoff.MAX_TIMEOUT", 0.3)
    check_fallback(lambda target, prefill_worker: None, 1)


def test_lost_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.policy.routing.handoff.MAX_TIMEOUT", 0.3)
    target, prefill_worker = Target("t"), PrefillWorker("p")
    prefill_worker.listener.lose = lambda message: isinstance(message, PrefillStarted)  # type: ignore[method-assign]
    with split_cluster(target, prefill_worker) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert (target.handoffs.counts().done, target.handoffs.counts().failed > 0) == (0, True)
        assert_all_released(target, prefill_worker)


def test_corrupt_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All checksums are wrong."""
    monkeypatch.setattr("paceline.transfer.transfer.crc32", lambda data: crc32(data) ^ 1)
    check_fallback(lambda target, prefill_worker: None)


def test_a_failing_cache_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no")

    monkeypatch.setattr(PromptImport, "write", broken)
    check_fallback(lambda target, prefill_worker: None)


def test_a_failing_cache_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("paceline.worker.handoff.export.read_layer", broken)
    check_fallback(lambda target, prefill_worker: None)


def test_blocks_of_another_model_are_refused() -> None:
    other = tiny_engine(tiny_model(config=changed(MODEL.config, num_layers=MODEL.config.num_layers + 1)))
    other.tokenizer = other.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    target, prefill_worker = Target("t"), PrefillWorker("p", other)
    with split_cluster(target, prefill_worker) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert target.handoffs.counts().done == 0


def test_a_request_cancelled_during_its_hand_off() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p", steps=1)
    with split_cluster(target, prefill_worker) as pool:
        StreamReader(pool, REQUESTS[0])
        assert prefill_worker.gate is not None
        assert prefill_worker.gate.reached.wait(20)
        pool.cancel("greedy")
        assert_all_released(target)
        assert target.handoffs.counts().failed == 0
        prefill_worker.gate.open()
        assert_all_released(prefill_worker)
        assert tokens_of(StreamReader(pool, REQUESTS[0]).read_all(), "greedy") == EXPECTED["greedy", 0][0]


def test_a_target_that_stops_during_a_hand_off_releases_everything() -> None:
    target, other, prefill_worker = Target("t0"), Target("t1"), PrefillWorker("p", steps=1)
    with split_cluster(target, other, prefill_worker, router="round_robin") as pool:
        stream = StreamReader(pool, REQUESTS[0])
        assert prefill_worker.gate is not None
        assert prefill_worker.gate.reached.wait(20)
        target.stop()
        prefill_worker.gate.open()
        assert tokens_of(stream.read_all(), "greedy") == EXPECTED["greedy", 0][0]
        assert_all_released(prefill_worker, other)


def test_without_free_blocks_prompts_are_computed_by_the_target() -> None:
    """The target's cache holds little more than one sequence of full length."""
    target, prefill_worker = Target("t", engine_of(tokenizer=True, kv_tokens=288)), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert target.handoffs.counts().done == 0
        assert_all_released(target, prefill_worker)


def test_a_prefill_worker_accepts_what_its_cache_holds() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p", engine_of(tokenizer=True, kv_tokens=480))
    with split_cluster(target, prefill_worker) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert_all_released(target, prefill_worker)


def test_without_prefill_workers_there_are_no_hand_offs() -> None:
    target = Target("t")
    with split_cluster(target) as pool:
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert target.handoffs.counts() == type(target.handoffs.counts())()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "other"}, "same model, dtype"),
        ({"ids": list(LONG[:17])}, "no whole blocks"),
        ({"first": 2}, "invalid block range"),
        ({"state_layers": [99]}, "invalid state layers"),
        ({"state_layers": [1, 1]}, "distinct layers"),
        ({"ids": [10**6] * 16}, "outside the vocabulary"),
        ({"ids": [1] * 512}, "cache is full|window"),
        ({"epoch": 1}, "another epoch"),
    ],
)
def test_invalid_prefill_messages_are_refused(change: dict[str, Any], why: str) -> None:
    prefill_worker = PrefillWorker("p")
    try:
        message = Prefill(
            epoch=prefill_worker.worker.epoch,
            attempt=1,
            ids=list(LONG[:32]),
            salt="",
            first=0,
            layout=CacheLayout.of(prefill_worker.engine.runner).name,
            state_layers=[],
            state_rows=0,
        )
        replies = _replies(prefill_worker, [message, _changed(message, change)])
        assert isinstance(replies[0], PrefillStarted)
        assert re.search(why, replies[1].message)
        until(lambda: prefill_worker.service.counts().failed + prefill_worker.service.counts().done == 1)
        assert_all_released(prefill_worker)
    finally:
        prefill_worker.stop()


def _changed(message: Prefill, change: dict[str, Any]) -> Prefill:
    return structs.replace(message, **{"attempt": 2, **change})


def _replies(prefill_worker: PrefillWorker, messages: list[Prefill]) -> list[Any]:
    """Replies to a peer that sends a goodbye afterwards."""
    connection = Connection(prefill_worker.worker.address, TO_GATEWAY)
    try:
        replies = []
        for message in messages:
            connection.send(message)
            replies.append(connection.receive(20))
        connection.send(Goodbye(""))
        until(lambda: not prefill_worker.worker._sessions.by_peer)
        return replies
    finally:
        connection.close()


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 8 blocks, as of a large model. Blocks of the tiny model are small, and a part would have all of them."""
    monkeypatch.setattr("paceline.engine.hooks.handoff.SEGMENT_BLOCKS", (8, 8))


@pytest.mark.usefixtures("_small_parts")
def test_parts_arrive_while_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    write = PromptImport.write

    def counted(self: PromptImport, part: Any, data: Any) -> None:
        write(self, part, data)
        written.append(part)

    monkeypatch.setattr(PromptImport, "write", counted)
    engine = engine_of(tokenizer=True, max_batched_tokens=128)  # the first of two passes has 8 of 12 blocks
    target, prefill_worker = Target("t"), PrefillWorker("p", engine, steps=1)
    with split_cluster(target, prefill_worker) as pool:
        stream = StreamReader(pool, REQUESTS[0])
        assert prefill_worker.gate is not None
        assert prefill_worker.gate.reached.wait(20)
        until(lambda: len(written) == MODEL.config.num_layers)
        assert {(part.start, part.stop) for part in written} == {(0, 8)}
        assert stream.outputs == []
        prefill_worker.gate.open()
        assert tokens_of(stream.read_all(), "greedy") == EXPECTED["greedy", 0][0]


@pytest.mark.usefixtures("_small_parts")
def test_blocks_that_arrived_before_a_failure_are_not_computed_again() -> None:
    engine = engine_of(tokenizer=True, max_batched_tokens=128)
    target, prefill_worker = Target("t"), PrefillWorker("p", engine, steps=1)
    with split_cluster(target, prefill_worker) as pool:
        stream = StreamReader(pool, REQUESTS[0])
        assert prefill_worker.gate is not None
        assert prefill_worker.gate.reached.wait(20)
        steps = target.engine.num_steps
        until(lambda: _num_complete(target) == 8)
        prefill_worker.stop()
        assert tokens_of(stream.read_all(), "greedy") == EXPECTED["greedy", 0][0]
        # At most 71 tokens are left, two steps of 64; all 199 tokens would take four
        assert target.engine.num_steps - steps <= len(EXPECTED["greedy", 0][0]) + 1


def _num_complete(target: Target) -> int:
    """Complete blocks of the only prompt in hand-off, read from the cache itself."""
    (prompt,) = target.handoffs._pending.values()
    incoming = prompt.incoming
    if incoming is None:
        return 0
    keys, _ = target.engine.runner.cache[-1]
    return sum(bool(keys[block].any()) for block in incoming.blocks)


def test_a_prefill_worker_generates_no_requests() -> None:
    target, prefill_worker = Target("t"), PrefillWorker("p")
    with split_cluster(target, prefill_worker) as pool:
        assert pool.max_num_seqs == target.engine.scheduler.max_num_seqs
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert pool.targets()["p"].num_tokens == 0
        roles = {worker.name: (worker.role, worker.state) for worker in pool.workers()}
        assert (roles["t"], roles["p"]) == (("target", "ready"), ("prefill", "ready"))


def test_an_unhealthy_prefill_worker_gets_no_prompts() -> None:
    wrong = tiny_engine(tiny_model(perturb=0.5))
    wrong.tokenizer = wrong.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    a, b, prefill_worker = Target("a"), Target("b"), PrefillWorker("p", wrong)
    pool = TargetPool(cluster(health=replace(LENIENT, canary=0.05)), Members(a, b, prefill_worker))
    try:
        until(lambda: "p" in pool.targets() and pool.targets()["p"].state is WorkerState.UNHEALTHY)
        for target in (a, b):
            until(lambda target=target: not target.handoffs._connections.loads)  # type: ignore[misc]
        assert texts_of(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
    finally:
        pool.close()
        for worker in (a, b, prefill_worker):
            worker.stop()
