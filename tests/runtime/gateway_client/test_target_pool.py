"""Target workers behind one interface: the text is that of one engine, whatever happens to the workers."""

from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.health.health import WorkerState
from paceline.core.errors import EngineClosed, InvalidRequest
from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.core.speculation import SpeculationFlags
from paceline.runtime.wire.stream_messages import Outputs
from tests.engine.harness import GREEDY, PROMPT, SAMPLED, engine_of, outputs_of, request, text_of, tokens_of
from tests.fakes import tiny_engine, tiny_model
from tests.runtime.target_harness import LENIENT, STRICT, Gate, Members, StreamReader, WorkerThread, pool_of, until

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


def texts(outputs: list[StepOutput], asked: list[Request] = REQUESTS) -> dict[Any, Any]:
    """By request and choice: tokens, text, log-probabilities, and how it ended."""
    result = {}
    for one in asked:
        for choice in range(one.sampling.n):
            own = [o for o in outputs if (o.request_id, o.choice) == (one.id, choice)]
            logprobs = [p for o in own for p in o.logprobs or ()]
            reasons = [o.finish_reason for o in own if o.finish_reason]
            result[one.id, choice] = (tokens_of(own, one.id, choice), text_of(own), logprobs, reasons)
    return result


EXPECTED = texts([output for one in REQUESTS for output in outputs_of(engine_of(tokenizer=True), one)])


def test_two_workers_say_what_one_engine_says() -> None:
    with pool_of(WorkerThread("a"), WorkerThread("b")) as pool:
        assert pool.seats == 16
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert pool.continued == 0


@pytest.mark.parametrize("steps", [1, 4, 11])
@pytest.mark.parametrize("end", ["leaves", "vanishes", "loses"])
def test_a_lost_worker_is_not_noticed_in_the_text(end: str, steps: int) -> None:
    a, b = WorkerThread("a", steps=steps), WorkerThread("b")
    with pool_of(a, b, health=STRICT if end == "vanishes" else LENIENT) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(20)
        if end == "leaves":
            a.stop()
        elif end == "vanishes":
            a.listener.cut = True
        else:  # one message of many outputs gets lost on the way; had it been a stream's last, nothing would tell
            left = iter([True])

            def lose(message: object) -> bool:
                return (
                    isinstance(message, Outputs)
                    and all(output.finish_reason is None for output in message.outputs)
                    and next(left, False)
                )

            a.listener.lose = lose  # type: ignore[method-assign]
            a.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        assert pool.continued > 0


def test_a_worker_that_started_anew_is_used_again() -> None:
    a = WorkerThread("a", steps=5)
    with pool_of(a) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None
        assert a.gate.reached.wait(20)
        a.listener.cut = True  # not even a goodbye
        a.stop()
        again = WorkerThread("a", port=a.port)
        try:
            assert texts(reader.read_all()) == EXPECTED
            assert pool.targets()["a"].health.epoch == again.worker.epoch
        finally:
            again.stop()


def test_a_worker_that_was_only_silent_returns_and_its_old_words_are_void() -> None:
    a, b = WorkerThread("a", steps=3), WorkerThread("b", steps=0)
    with pool_of(a, b, health=STRICT) as pool:
        reader = StreamReader(pool, *REQUESTS)
        assert a.gate is not None and b.gate is not None  # noqa: PT018
        assert a.gate.reached.wait(20)
        a.listener.cut = True
        until(lambda: pool.targets()["a"].state is WorkerState.SUSPECTED)
        a.listener.cut = False
        a.gate.open()  # it goes on with streams that are b's by now, until it hears of it
        until(lambda: pool.targets()["a"].is_usable)
        b.gate.open()
        assert texts(reader.read_all()) == EXPECTED
        until(lambda: not a.engine.has_work)


def test_who_has_not_been_found_yet_is_listed() -> None:
    with pool_of(WorkerThread("target-1")) as pool:
        until(lambda: [row.state for row in pool.workers() if row.name == "target-1"] == ["ready"])
        assert [(row.name, row.state) for row in pool.workers()] == [("target-0", "starting"), ("target-1", "ready")]


def test_requests_wait_for_the_first_worker() -> None:
    with pool_of(wait=False) as pool:
        reader = StreamReader(pool, REQUESTS[1])
        late = WorkerThread("late")
        try:
            assert isinstance(pool._directory, Members)
            pool._directory.known.append(late.member)
            assert tokens_of(reader.read_all(), "r1") == EXPECTED["r1", 0][0]
            assert pool.wait_ready(5) is not None
        finally:
            late.stop()


def test_cancelling_frees_the_worker() -> None:
    a = WorkerThread("a", steps=2)
    with pool_of(a) as pool:
        reader = StreamReader(pool, request("r", PROMPT, max_tokens=200, **GREEDY))
        reader.read()
        pool.cancel("r")
        pool.cancel("never reader of")
        assert a.gate is not None
        a.gate.open()
        until(lambda: not a.engine.has_work)
        assert pool.targets()["a"].streams == {}
        StreamReader(pool, request("r", PROMPT, max_tokens=3, **GREEDY)).read_all()  # the id is free again


def test_the_worker_has_the_last_word_on_a_request() -> None:
    with pool_of(WorkerThread("a")) as pool:
        reader = StreamReader(pool, request("r", [4000], max_tokens=3))
        with pytest.raises(InvalidRequest, match="outside the vocabulary") as error:
            reader.read_all()
        assert error.value.field == "prompt"


def test_one_id_runs_once() -> None:
    with pool_of(WorkerThread("a", steps=0)) as pool:
        StreamReader(pool, REQUESTS[0])
        with pytest.raises(InvalidRequest, match="already running"):
            StreamReader(pool, REQUESTS[0])


def test_a_gateway_that_closes_tells_its_callers_and_frees_its_workers() -> None:
    a = WorkerThread("a", steps=3)
    with pool_of(a) as pool:
        reader = StreamReader(pool, request("r", PROMPT, max_tokens=200, **GREEDY))
        assert a.gate is not None
        assert a.gate.reached.wait(20)
        pool.close()
        a.gate.open()
        with pytest.raises(EngineClosed):
            reader.read_all()
        until(lambda: not a.engine.has_work)
        with pytest.raises(EngineClosed):
            StreamReader(pool, REQUESTS[0])


def test_a_new_gateway_finds_the_workers_of_the_old_one() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    epochs = {a.worker.epoch, b.worker.epoch}
    with pool_of(a, b) as pool:
        StreamReader(pool, *REQUESTS).read_all()
        pool.close()
        with pool_of(a, b) as second:
            assert texts(StreamReader(second, *REQUESTS).read_all()) == EXPECTED
            assert {line.health.epoch for line in second.targets().values()} == epochs


def test_flags_reach_every_worker_and_those_that_join_later() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    with pool_of(a) as pool:
        pool.set_flags(SpeculationFlags(enabled=True, max_depth=2))
        until(lambda: a.engine.snapshot().flags.max_depth == 2)
        assert isinstance(pool._directory, Members)
        pool._directory.known.append(b.member)
        until(lambda: b.engine.snapshot().flags.max_depth == 2)
        until(lambda: {r.max_depth for r in pool.reports()} == {2} and len(pool.reports()) == 2)
    b.stop()


def test_a_worker_with_other_weights_is_found_out() -> None:
    """And gets nothing to do, while the right ones go on."""
    wrong = tiny_engine(tiny_model(seed=9))
    wrong.tokenizer = wrong.validator._tokenizer = engine_of(tokenizer=True).tokenizer
    workers = [WorkerThread("a"), WorkerThread("b"), WorkerThread("c", wrong)]
    with pool_of(*workers, health=replace(LENIENT, canary=0.5)) as pool:
        until(lambda: pool.targets()["c"].state is WorkerState.UNHEALTHY)
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert {pool.targets()[name].state for name in "ab"} == {WorkerState.READY}


def test_a_request_that_kills_whoever_takes_it_is_given_up() -> None:
    with pool_of(WorkerThread("a", steps=0)) as pool:
        reader = StreamReader(pool, request("r", PROMPT, **GREEDY))
        line = pool.targets()["a"]
        for _ in range(9):
            until(lambda: bool(line.streams))
            ((attempt, stream),) = line.streams.items()
            pool._mailbox.put(lambda stream=stream: pool._streams.move(stream))  # type: ignore[misc]
            until(lambda attempt=attempt: attempt not in line.streams)  # type: ignore[misc]
        with pytest.raises(EngineClosed, match="lost 9 workers"):
            reader.read_all()


def test_a_broken_listener_ends_its_own_request_only() -> None:
    with pool_of(WorkerThread("a")) as pool:
        pool.submit(request("bad", PROMPT, **GREEDY), lambda event: 1 / 0)  # type: ignore[arg-type, return-value]
        assert tokens_of(StreamReader(pool, REQUESTS[1]).read_all(), "r1") == EXPECTED["r1", 0][0]
        until(lambda: "bad" not in pool._streams)


def test_a_stuck_engine_is_suspected() -> None:
    a, b = WorkerThread("a"), WorkerThread("b")
    stuck = Gate(a.engine, 2)
    with pool_of(a, b, health=replace(LENIENT, stall=0.5)) as pool:
        assert texts(StreamReader(pool, *REQUESTS).read_all()) == EXPECTED
        assert pool.targets()["a"].state is WorkerState.SUSPECTED
        stuck.open()
        until(lambda: pool.targets()["a"].is_usable)
