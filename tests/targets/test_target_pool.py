"""The target pool: outputs equal those of one engine, whatever happens to the workers."""

from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.core.errors import EngineClosed, InvalidRequest
from paceline.core.output import StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.engine.failures import StepTimePrediction
from paceline.policy.health import StallDetector, WorkerState
from paceline.targets.pool import TargetPool
from paceline.wire.gateway_messages import Outputs
from paceline.wire.worker_spec import Member, Phase
from tests.engine.harness import GREEDY, PROMPT, SAMPLED, engine_of, outputs_of, request, text_of, tokens_of
from tests.fakes import tiny_engine, tiny_model
from tests.processes.target_harness import (
    LENIENT,
    WAIT,
    Gate,
    Members,
    StreamReader,
    WorkerThread,
    disappear,
    fingerprint,
    pool_of,
    until,
)

REQUESTS = [
    request(f"r{i}", [*PROMPT, i], **({"max_tokens": 24} | sampling))
    for i, sampling in enumerate(
        (
            GREEDY,
            SAMPLED,
            {**SAMPLED, "n": 3},
            {**SAMPLED, "logprobs": 2},
            {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
            {**SAMPLED, "stop": ("ab", "cd", "e"), "max_tokens": 60},
            {
                **SAMPLED,
                "json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
                "max_tokens": 40,
            },
        )
    )
]


def texts(outputs: list[StepOutput], requests: list[Request] = REQUESTS) -> dict[Any, Any]:
    """Tokens, text, log-probabilities and finish reasons, by request and choice."""
    result = {}
    for one in requests:
        for choice in range(one.sampling.n):
            own = [o for o in outputs if (o.request_id, o.choice) == (one.id, choice)]
            logprobs = [p for o in own for p in o.logprobs or ()]
            reasons = [o.finish_reason for o in own if o.finish_reason]
            result[one.id, choice] = (tokens_of(own, one.id, choice), text_of(own, one, choice), logprobs, reasons)
    return result


EXPECTED = texts([output for one in REQUESTS for output in outputs_of(engine_of(tokenizer=True), one)])


def test_two_workers_generate_what_one_engine_does() -> None:
    with pool_of(WorkerThread("a"), WorkerThread("b")) as pool:
        assert pool.max_num_seqs == 16
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert pool.num_continued == 0


@pytest.mark.parametrize("steps", [1, 4, 11])
@pytest.mark.parametrize("end", ["stops", "disappears", "loses a message"])
def test_lost_worker_does_not_change_the_outputs(end: str, steps: int) -> None:
    a, b = WorkerThread("a", steps=steps), WorkerThread("b")
    with pool_of(a, b) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        if end == "stops":
            a.worker.stop()
            until(lambda: pool.num_continued > 0)  # before its engine continues: it could finish the streams
        elif end == "disappears":
            disappear(a, pool)
        else:
            left = iter([True])
            a.listener.lose = lambda message: isinstance(message, Outputs) and next(left, False)  # type: ignore[method-assign]
            a.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        assert pool.num_continued > 0


def test_restarted_worker_is_used_again() -> None:
    a = WorkerThread("a", steps=5)
    with pool_of(a) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        a.listener.is_cut = True  # without a goodbye
        a.stop()
        again = WorkerThread("a", port=a.port)
        try:
            assert texts(reader.read_all()) == EXPECTED
            assert pool.targets()["a"].health.epoch == again.worker.epoch
        finally:
            again.stop()


def test_stale_outputs_of_a_silent_worker_are_ignored() -> None:
    a, b = WorkerThread("a", steps=3), WorkerThread("b", steps=0)
    with pool_of(a, b) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None and b.gate is not None  # noqa: PT018
        assert a.gate.reached.wait(WAIT)
        disappear(a, pool)
        until(lambda: pool.targets()["a"].state is WorkerState.SUSPECTED)
        a.listener.is_cut = False
        a.gate.open()  # it continues streams that belong to b now, until it is cancelled
        until(lambda: pool.targets()["a"].is_usable)
        b.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        until(lambda: not a.engine.has_work)


def test_member_without_address_is_listed() -> None:
    with pool_of(WorkerThread("target-1")) as pool:
        assert isinstance(pool._watch.directory, Members)
        pool._watch.directory.known.insert(0, Member("target-0", "target", "target", ""))
        until(lambda: [row.state for row in pool.workers() if row.name == "target-1"] == ["ready"])
        until(lambda: len(pool.workers()) == 2)
        assert [(row.name, row.state) for row in pool.workers()] == [("target-0", "joining"), ("target-1", "ready")]


def set_phase(pool: TargetPool, name: str, phase: Phase) -> None:
    assert isinstance(pool._watch.directory, Members)
    pool._watch.directory.known = [
        replace(m, phase=phase if m.name == name else m.phase) for m in pool._watch.directory.known
    ]
    until(lambda: pool.targets()[name].member.phase == phase)


def test_streams_of_a_draining_worker_finish_and_new_ones_go_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "paceline")
    a, b = WorkerThread("a", steps=3), WorkerThread("b")
    with pool_of(a, b) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        set_phase(pool, "a", "draining")
        a.worker.drain(60)
        until(lambda: {row.name: row.state for row in pool.workers()} == {"a": "draining", "b": "ready"})
        started = len(pool.targets()["a"].streams)
        late = StreamReader(pool, *(replace(one, id=f"late-{one.id}") for one in REQUESTS))
        late.read_all()
        assert len(pool.targets()["a"].streams) == started > 0
        a.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        a.thread.join(WAIT)
        assert not a.thread.is_alive()
        assert pool.num_continued == 0
        until(lambda: "target worker a has exited while draining" in caplog.messages)
        assert "suspected" not in caplog.text


def test_streams_continue_elsewhere_when_the_drain_is_over() -> None:
    a, b = WorkerThread("a", steps=3), WorkerThread("b")
    with pool_of(a, b) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        a.worker.drain(0)
        assert texts(reader.read_all()) == EXPECTED
        assert pool.num_continued > 0


def test_a_worker_on_trial_gets_no_streams() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    with pool_of(a, b) as pool:
        set_phase(pool, "a", "trial")
        assert [row.state for row in pool.workers()] == ["joining", "ready"]
        StreamReader(pool, *REQUESTS).read_all()
        assert pool.targets()["a"].num_tokens == 0
        events: SimpleQueue[Any] = SimpleQueue()
        pool.submit_to("a", replace(REQUESTS[1], id="pinned"), events.put)
        events.get(timeout=WAIT)
        assert pool.targets()["a"].num_tokens > 0
        set_phase(pool, "a", "serving")
        assert pool.targets()["a"].takes_streams


def test_requests_wait_for_the_first_worker() -> None:
    with pool_of(wait=False) as pool:
        reader = StreamReader(pool, REQUESTS[1])
        late = WorkerThread("late")
        try:
            assert isinstance(pool._watch.directory, Members)
            pool._watch.directory.known.append(late.member)
            assert tokens_of(reader.read_all(), "r1") == EXPECTED["r1", 0][0]
            assert pool.wait_ready(5) is not None
        finally:
            late.stop()


def test_cancel_frees_the_worker() -> None:
    a = WorkerThread("a", steps=2)
    with pool_of(a) as pool:
        reader = StreamReader(pool, request("r", PROMPT, max_tokens=200, **GREEDY))
        reader.read()
        pool.cancel("r")
        pool.cancel("unknown")
        assert a.gate is not None
        a.gate.open()
        until(lambda: not a.engine.has_work)
        assert pool.targets()["a"].streams == {}
        StreamReader(pool, request("r", PROMPT, max_tokens=3, **GREEDY)).read_all()  # the id is free again


def test_worker_can_reject_a_request() -> None:
    with pool_of(WorkerThread("a")) as pool:
        reader = StreamReader(pool, request("r", [4000], max_tokens=3))
        with pytest.raises(InvalidRequest, match="outside the vocabulary") as error:
            reader.read_all()
        assert error.value.field == "prompt"


def test_request_id_must_be_unique() -> None:
    with pool_of(WorkerThread("a", steps=0)) as pool:
        StreamReader(pool, REQUESTS[0])
        with pytest.raises(InvalidRequest, match="already running"):
            StreamReader(pool, REQUESTS[0])


def test_close_fails_running_requests_and_frees_the_workers() -> None:
    a = WorkerThread("a", steps=3)
    with pool_of(a) as pool:
        reader = StreamReader(pool, request("r", PROMPT, max_tokens=200, **GREEDY))
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        pool.close()
        a.gate.open()
        with pytest.raises(EngineClosed):
            reader.read_all()
        until(lambda: not a.engine.has_work)
        with pytest.raises(EngineClosed):
            StreamReader(pool, REQUESTS[0])


def test_second_gateway_uses_the_same_workers() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    epochs = {a.worker.epoch, b.worker.epoch}
    with pool_of(a, b) as pool:
        StreamReader(pool, *REQUESTS).read_all()
        pool.close()
        with pool_of(a, b) as second:
            assert texts(StreamReader(second, *REQUESTS).read_all()) == EXPECTED
            assert {target.health.epoch for target in second.targets().values()} == epochs


def test_flags_reach_all_workers_including_later_ones() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    with pool_of(a) as pool:
        pool.set_flags(SpeculationFlags(enabled=True, max_depth=2))
        until(lambda: a.engine.status.snapshot().flags.max_depth == 2)
        assert isinstance(pool._watch.directory, Members)
        pool._watch.directory.known.append(b.member)
        until(lambda: b.engine.status.snapshot().flags.max_depth == 2)
        until(lambda: {report.status.flags.max_depth for report in pool.reports()} == {2} and len(pool.reports()) == 2)
    b.stop()


def test_canaries_detect_a_worker_with_other_weights() -> None:
    """It gets no requests, and the other workers continue."""
    wrong = tiny_engine(tiny_model(seed=9))
    wrong.tokenizer = wrong.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    workers = [WorkerThread("a"), WorkerThread("b"), WorkerThread("c", wrong)]
    with pool_of(*workers, health=replace(LENIENT, canary=0.5)) as pool:
        until(lambda: pool.targets()["c"].state is WorkerState.UNHEALTHY)
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert {pool.targets()[name].state for name in "ab"} == {WorkerState.READY}


def test_request_that_loses_too_many_workers_fails() -> None:
    with pool_of(WorkerThread("a", steps=0)) as pool:
        reader = StreamReader(pool, request("r", PROMPT, **GREEDY))
        target = pool.targets()["a"]
        for _ in range(9):
            until(lambda: bool(target.streams))
            ((attempt, stream),) = target.streams.items()
            pool._commands.put(lambda stream=stream: pool._streams._reassign(stream))  # type: ignore[misc]
            until(lambda attempt=attempt: attempt not in target.streams)  # type: ignore[misc]
        with pytest.raises(EngineClosed, match="failed on 9 workers"):
            reader.read_all()


def test_listener_that_raises_ends_its_own_request_only() -> None:
    with pool_of(WorkerThread("a")) as pool:
        pool.submit(request("bad", PROMPT, **GREEDY), lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
        assert tokens_of(StreamReader(pool, REQUESTS[1]).read_all(), "r1") == EXPECTED["r1", 0][0]
        until(lambda: "bad" not in pool._streams._streams)


class MeasuredWatch(StepTimePrediction):
    """A watch that has measured steps of every size."""

    def begin(self, num_tokens: int, now: float) -> None:
        super().begin(num_tokens, now)
        self.step_seconds = 0.0


def test_slow_step_of_an_unmeasured_size_raises_no_alarm() -> None:
    a = WorkerThread("a", steps=2)
    with pool_of(a, health=replace(LENIENT, stall=0.01)) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        seen = pool.targets()["a"].heartbeat
        until(lambda: pool.targets()["a"].heartbeat is not seen)
        target = pool.targets()["a"]
        assert target.state is WorkerState.READY
        target.health._steps = StallDetector(LENIENT.stall)  # the next steps are measured, and may be slow
        a.gate.open()
        assert texts(reader.read_all()) == EXPECTED


@pytest.mark.parametrize("num_early", [3, len(REQUESTS)])
def test_streams_that_a_worker_has_dropped_are_continued(num_early: int) -> None:
    """A worker drops the streams of a gateway that was suspended, and its messages are lost. Requests that the worker receives
    after that are not dropped."""
    a = WorkerThread("a", steps=4)

    def drop() -> None:
        for gateway in a.worker._sessions.by_peer.values():
            gateway.last_message = -1e9
        a.worker._drop_silent_gateways()

    with pool_of(a) as pool:
        reader = StreamReader(pool, *REQUESTS[:num_early])
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        until(lambda: a.listener.num_submitted == num_early)
        a.listener.is_cut = True
        a.run(drop)
        reader.submit(*REQUESTS[num_early:])
        until(lambda: a.listener.num_submitted == len(REQUESTS))
        assert pool.num_continued == 0  # the gateway does not know it yet
        a.listener.is_cut = False
        a.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        assert 0 < pool.num_continued <= num_early


def test_stalled_engine_is_suspected() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    a.engine.watch = MeasuredWatch()
    stuck = Gate(a.engine, 2)
    with pool_of(a, b, health=replace(LENIENT, stall=0.5)) as pool:
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert pool.targets()["a"].state is WorkerState.SUSPECTED
        stuck.open()
        until(lambda: pool.targets()["a"].is_usable)


def test_workers_with_other_weights_are_refused_and_continue_no_stream() -> None:
    a, b, other, new = (WorkerThread(name) for name in ("a", "b", "other", "new"))
    for worker, weights in ((a, "1"), (b, "1"), (other, "2"), (new, "2")):
        worker.backend._fingerprint = fingerprint(weights)
    with pool_of(a, b) as pool:
        assert isinstance(pool._watch.directory, Members)
        pool._watch.directory.known += [other.member, replace(new.member, revision=1)]
        try:
            until(lambda: {row.name: row.state for row in pool.workers()}.get("other") == "refused")
            assert "it has weights 2, not 1" in next(row.refusal for row in pool.workers() if row.name == "other")
            until(lambda: pool.targets()["new"].takes_streams)  # another revision: its canary texts decide
            gate_a, gate_b = Gate(a.engine, 3), Gate(b.engine, 10**9)
            gate_b.open()
            reader = StreamReader(pool, *REQUESTS)
            assert gate_a.reached.wait(WAIT)
            a.worker.drain(0)
            reader.read_all()
            assert pool.num_continued > 0
            gate_a.open()
        finally:
            for worker in (other, new):
                worker.stop()
