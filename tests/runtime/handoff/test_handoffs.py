"""Prompts computed by a prefill worker: real sockets, tiny engines, and everything that may go wrong on the way."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest
from msgspec import structs

from paceline.cluster.health.health import WorkerState
from paceline.core.output import StepOutput
from paceline.engine.engine import Engine
from paceline.engine.hooks.handoff_plan import CacheLayout
from paceline.engine.hooks.imports import Arrival
from paceline.engine.loop import EngineLoop
from paceline.runtime.deploy.directory import Member
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.handoff.handoffs import Handoffs
from paceline.runtime.handoff.prefill_service import PrefillDesk
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.transfer.server import TransferServer
from paceline.runtime.transfer.transfer import checksum
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.stream_messages import TO_GATEWAY, TO_TARGET_WORKER, Prefill, PrefillStarted
from paceline.runtime.wire.transport import Connection
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
from tests.runtime.target_harness import PATIENT, QUICK, Deaf, Gate, Heard, Members, Running, cluster, until

LONG = tuple((7 * i + i // 11) % 40 for i in range(199))
THRESHOLD = 40


class Target(Running):
    """A decode worker."""

    def __init__(self, name: str, engine: Engine | None = None, health: Any = PATIENT) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None
        self.listener = Deaf("tcp://127.0.0.1:0", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.handoffs = Handoffs(loop, threshold=THRESHOLD, health=health)
        self.worker = TargetWorker(name, loop, self.listener, handoffs=self.handoffs)
        self._start()


class Prefiller(Running):
    def __init__(self, name: str, engine: Engine | None = None, steps: int | None = None, port: int = 0) -> None:
        self.engine = engine or engine_of(tokenizer=True)
        self.gate = None if steps is None else Gate(self.engine, steps)
        self.listener = Deaf(f"tcp://127.0.0.1:{port}", TO_TARGET_WORKER)
        loop = EngineLoop(self.engine)
        self.desk = PrefillDesk(loop, TransferServer("127.0.0.1", None))
        self.worker = TargetWorker(name, loop, self.listener, desk=self.desk)
        self._start()

    @property
    def member(self) -> Member:
        return Member(self.worker.name, "prefill", "prefill", self.worker.address)


@contextmanager
def apart(*workers: Running, **options: Any) -> Iterator[TargetPool]:
    """A gateway before these workers, the prefill workers among them known to the targets."""
    pool = TargetPool(cluster(**options), Members(*workers))
    try:
        until(lambda: sum(line.is_usable for line in pool.lines().values()) == len(workers))
        prefillers = sum(isinstance(worker, Prefiller) for worker in workers)
        for worker in workers:
            if isinstance(worker, Target):
                until(lambda handoffs=worker.handoffs: len(handoffs._lines.loads) == prefillers)  # type: ignore[misc]
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


def said(outputs: list[StepOutput]) -> dict[tuple[str, int], tuple[list[int], str]]:
    keys = [(one.id, choice) for one in REQUESTS for choice in range(one.sampling.n)]
    own = {key: [o for o in outputs if (o.request_id, o.choice) == key] for key in keys}
    return {key: (tokens_of(own[key], *key), text_of(own[key])) for key in keys}


EXPECTED = said([output for one in REQUESTS for output in outputs_of(engine_of(tokenizer=True), one)])


def all_back(*workers: Running) -> None:
    """Nothing is held by anybody, once the last word has been heard."""
    for worker in workers:
        tables = worker.engine.scheduler.tables
        until(lambda tables=tables: tables.pool.num_free == tables.pool.num_blocks)  # type: ignore[misc]
        assert_nothing_held(worker.engine)
        if isinstance(worker, Prefiller):
            assert worker.desk._jobs == {}


def test_the_text_is_that_of_one_engine_and_long_prompts_are_computed_elsewhere() -> None:
    target, prefiller = Target("t"), Prefiller("p")
    with apart(target, prefiller) as pool:
        for one in REQUESTS:
            heard = Heard(pool, one).all()
            assert tokens_of(heard, one.id) == EXPECTED[one.id, 0][0]
            assert heard[0].num_cached == 0  # what was handed over is not what was cached
        record = target.handoffs.record()
        assert (record.done, record.failed) == (4, 0)
        assert record.tokens == 192 + 192 + 176 + 128
        assert record.seconds > 0
        until(lambda: prefiller.desk.record().done == 4)
        assert prefiller.desk.record().bytes == record.bytes
        all_back(target, prefiller)


def test_many_at_once_between_several_workers() -> None:
    workers = [Target("t0"), Target("t1"), Prefiller("p0"), Prefiller("p1")]
    with apart(*workers) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        all_back(*workers)


def test_what_is_cached_or_short_stays_whole() -> None:
    target, prefiller = Target("t"), Prefiller("p")
    with apart(target, prefiller) as pool:
        Heard(pool, REQUESTS[4]).all()
        Heard(pool, REQUESTS[0]).all()
        assert target.handoffs.record().done == 1
        again = Heard(pool, replace(REQUESTS[0], id="again", prompt_ids=(*LONG, 1, 2, 3))).all()
        assert again[0].num_cached == 192
        assert target.handoffs.record().done == 1


def test_tenants_share_nothing_on_either_side() -> None:
    target, prefiller = Target("t"), Prefiller("p")
    with apart(target, prefiller) as pool:
        for salt in ("a", "b", ""):
            heard = Heard(pool, replace(REQUESTS[0], id=f"of {salt}", cache_salt=salt)).all()
            assert tokens_of(heard, f"of {salt}") == EXPECTED["greedy", 0][0]
            assert heard[0].num_cached == 0
        assert target.handoffs.record().done == 3
        assert prefiller.engine.num_steps == 3 * 3  # 192 tokens in chunks of 64: nothing was hit there either


def test_a_head_drafts_as_if_nothing_had_been_handed_over() -> None:
    one = request("r", LONG, **GREEDY)
    expected = outputs_of(engine_of(eagle(MODEL), 6), one)
    engine = engine_of(eagle(MODEL), 6)
    engine.tokenizer = engine_of(tokenizer=True).tokenizer
    target, prefiller = Target("t", engine), Prefiller("p")
    with apart(target, prefiller) as pool:
        heard = Heard(pool, one).all()
        assert target.handoffs.record().done == 1
    assert tokens_of(heard) == tokens_of(expected)
    assert [(o.drafted, o.accepted) for o in heard] == [(o.drafted, o.accepted) for o in expected]


def test_a_stream_that_goes_on_here_brings_its_own_tokens_along() -> None:
    committed = tuple(EXPECTED["seeded", 0][0][:10])
    target, prefiller = Target("t"), Prefiller("p")
    with apart(target, prefiller):
        events: SimpleQueue[Any] = SimpleQueue()
        target.handoffs.submit(replace(REQUESTS[1], committed=(committed,)), events.put)
        heard = [events.get(timeout=20)]
        while heard[-1].finish_reason is None:
            heard.append(events.get(timeout=20))
        assert target.handoffs.record().tokens == 192  # of 206
    assert [*committed, *tokens_of(heard, "seeded")] == EXPECTED["seeded", 0][0]


# What may go wrong


def fails(spoil: Callable[[Target, Prefiller], None], steps: int | None = None, **options: Any) -> None:
    """Whatever `spoil` does once the prefill worker has come to its gate, the texts are the same, and nothing is held."""
    target, prefiller = Target("t", **options), Prefiller("p", engine_of(tokenizer=True), steps=steps)
    with apart(target, prefiller) as pool:
        heard = Heard(pool, *REQUESTS)
        if prefiller.gate is not None:
            assert prefiller.gate.reached.wait(20)
        spoil(target, prefiller)
        assert said(heard.all()) == EXPECTED
        assert target.handoffs.record().failed > 0
        all_back(target)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prefill_worker_that_stops(steps: int) -> None:
    fails(lambda target, prefiller: prefiller.stop(), steps)


def test_a_prefill_worker_that_vanishes() -> None:
    def vanish(target: Target, prefiller: Prefiller) -> None:
        prefiller.listener.cut = True

    fails(vanish, 1, health=QUICK)


def test_a_prefill_worker_that_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.routing.handoff.MOST_PATIENCE", 0.3)
    fails(lambda target, prefiller: None, 1)


def test_answers_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cluster.routing.handoff.MOST_PATIENCE", 0.3)
    target, prefiller = Target("t"), Prefiller("p")
    prefiller.listener.lose = lambda message: isinstance(message, PrefillStarted)  # type: ignore[method-assign]
    with apart(target, prefiller) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        assert (target.handoffs.record().done, target.handoffs.record().failed > 0) == (0, True)
        all_back(target, prefiller)


def test_bytes_that_change_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums are those of other bytes."""
    monkeypatch.setattr("paceline.runtime.transfer.transfer.checksum", lambda data: checksum(data) ^ 1)
    fails(lambda target, prefiller: None)


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("no")

    monkeypatch.setattr(Arrival, "write", broken)
    fails(lambda target, prefiller: None)


def test_a_cache_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("paceline.runtime.handoff.export_job.read_layer", broken)
    fails(lambda target, prefiller: None)


def test_another_model_is_never_taken_for_ours() -> None:
    other = tiny_engine(tiny_model(config=replace(MODEL.config, num_layers=MODEL.config.num_layers + 1)))
    other.tokenizer = other.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    target, prefiller = Target("t"), Prefiller("p", other)
    with apart(target, prefiller) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        assert target.handoffs.record().done == 0


def test_cancelled_on_the_way() -> None:
    target, prefiller = Target("t"), Prefiller("p", steps=1)
    with apart(target, prefiller) as pool:
        Heard(pool, REQUESTS[0])
        assert prefiller.gate is not None
        assert prefiller.gate.reached.wait(20)
        pool.cancel("greedy")
        all_back(target)
        assert target.handoffs.record().failed == 0
        prefiller.gate.open()
        all_back(prefiller)
        assert tokens_of(Heard(pool, REQUESTS[0]).all(), "greedy") == EXPECTED["greedy", 0][0]


def test_a_target_that_stops_on_the_way_leaves_nothing_behind() -> None:
    target, other, prefiller = Target("t0"), Target("t1"), Prefiller("p", steps=1)
    with apart(target, other, prefiller, router="round_robin") as pool:
        heard = Heard(pool, REQUESTS[0])
        assert prefiller.gate is not None
        assert prefiller.gate.reached.wait(20)
        target.stop()
        prefiller.gate.open()
        assert tokens_of(heard.all(), "greedy") == EXPECTED["greedy", 0][0]
        all_back(prefiller, other)


def test_no_room_to_spare_is_no_reason_to_wait() -> None:
    """The target's cache holds a sequence of full length and little more: prompts are computed as they always were."""
    target, prefiller = Target("t", engine_of(tokenizer=True, kv_tokens=288)), Prefiller("p")
    with apart(target, prefiller) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        assert target.handoffs.record().done == 0
        all_back(target, prefiller)


def test_a_desk_takes_no_more_than_its_cache_holds() -> None:
    target, prefiller = Target("t"), Prefiller("p", engine_of(tokenizer=True, kv_tokens=480))
    with apart(target, prefiller) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        all_back(target, prefiller)


def test_without_prefill_workers_nothing_is_asked() -> None:
    target = Target("t")
    with apart(target) as pool:
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        assert target.handoffs.record() == type(target.handoffs.record())()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"layout": "other"}, "same model, dtype"),
        ({"ids": list(LONG[:17])}, "no whole blocks"),
        ({"first": 2}, "are none"),
        ({"state_layers": [99]}, "no states"),
        ({"state_layers": [1, 1]}, "each once"),
        ({"ids": [10**6] * 16}, "outside the vocabulary"),
        ({"ids": [1] * 512}, "cache is full|window"),
        ({"epoch": 1}, "another epoch"),
    ],
)
def test_what_a_desk_refuses(change: dict[str, Any], why: str) -> None:
    prefiller = Prefiller("p")
    try:
        message = Prefill(
            epoch=prefiller.worker.epoch,
            attempt=1,
            ids=list(LONG[:32]),
            salt="",
            first=0,
            layout=CacheLayout.of(prefiller.engine.runner).name,
            state_layers=[],
            state_rows=0,
        )
        answers = _answers(prefiller, [message, _changed(message, change)])
        assert isinstance(answers[0], PrefillStarted)
        assert re.search(why, answers[1].message)
        until(lambda: prefiller.desk.record().failed + prefiller.desk.record().done == 1)
        all_back(prefiller)
    finally:
        prefiller.stop()


def _changed(message: Prefill, change: dict[str, Any]) -> Prefill:
    return structs.replace(message, **{"attempt": 2, **change})


def _answers(prefiller: Prefiller, messages: list[Prefill]) -> list[Any]:
    """Of a peer that says goodbye afterwards."""
    connection = Connection(prefiller.worker.address, TO_GATEWAY)
    try:
        answers = []
        for message in messages:
            connection.send(message)
            answers.append(connection.receive(20))
        connection.send(Goodbye(""))
        until(lambda: not prefiller.worker._gateways)
        return answers
    finally:
        connection.close()


def test_parts_arrive_while_the_prompt_is_still_being_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []
    write = Arrival.write

    def counted(self: Arrival, part: Any, data: Any) -> None:
        write(self, part, data)
        written.append(part)

    monkeypatch.setattr(Arrival, "write", counted)
    engine = engine_of(tokenizer=True, max_batched_tokens=128)  # the first of two passes has 8 of 12 blocks
    target, prefiller = Target("t"), Prefiller("p", engine, steps=1)
    with apart(target, prefiller) as pool:
        heard = Heard(pool, REQUESTS[0])
        assert prefiller.gate is not None
        assert prefiller.gate.reached.wait(20)
        until(lambda: len(written) == MODEL.config.num_layers)
        assert {(part.start, part.stop) for part in written} == {(0, 8)}
        assert heard.outputs == []
        prefiller.gate.open()
        assert tokens_of(heard.all(), "greedy") == EXPECTED["greedy", 0][0]


def test_what_came_before_it_failed_is_not_computed_again() -> None:
    engine = engine_of(tokenizer=True, max_batched_tokens=128)
    target, prefiller = Target("t"), Prefiller("p", engine, steps=1)
    with apart(target, prefiller) as pool:
        heard = Heard(pool, REQUESTS[0])
        assert prefiller.gate is not None
        assert prefiller.gate.reached.wait(20)
        steps = target.engine.num_steps
        until(lambda: _num_complete(target) == 8)
        prefiller.stop()
        assert tokens_of(heard.all(), "greedy") == EXPECTED["greedy", 0][0]
        # 71 tokens are left, in passes of 64, or fewer if another pass got through before it stopped; of all 199 it were four
        assert target.engine.num_steps - steps <= len(EXPECTED["greedy", 0][0]) + 1


def _num_complete(target: Target) -> int:
    """Blocks of the one prompt under way whose bytes are all there, as nobody but its fetch knows."""
    (pending,) = target.handoffs._pending.values()
    arrival = pending.arrival
    if arrival is None:
        return 0
    keys, _ = target.engine.runner.cache[-1]
    return sum(bool(keys[block].any()) for block in arrival.blocks)


def test_nobody_is_sent_to_a_prefill_worker_to_be_generated() -> None:
    target, prefiller = Target("t"), Prefiller("p")
    with apart(target, prefiller) as pool:
        assert pool.seats == target.engine.scheduler.max_num_seqs
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
        assert pool.lines()["p"].tokens == 0
        roles = {worker.name: (worker.role, worker.state) for worker in pool.workers()}
        assert (roles["t"], roles["p"]) == (("target", "ready"), ("prefill", "ready"))


def test_a_prefill_worker_that_contradicts_the_others_is_asked_nothing() -> None:
    wrong = tiny_engine(tiny_model(perturb=0.5))
    wrong.tokenizer = wrong.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    a, b, prefiller = Target("a"), Target("b"), Prefiller("p", wrong)
    pool = TargetPool(cluster(health=replace(PATIENT, canary=0.05)), Members(a, b, prefiller))
    try:
        until(lambda: "p" in pool.lines() and pool.lines()["p"].state is WorkerState.UNHEALTHY)
        for target in (a, b):
            until(lambda target=target: not target.handoffs._lines.loads)  # type: ignore[misc]
        assert said(Heard(pool, *REQUESTS).all()) == EXPECTED
    finally:
        pool.close()
        for worker in (a, b, prefiller):
            worker.stop()
