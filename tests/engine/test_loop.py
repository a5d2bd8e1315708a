"""Many callers, one engine thread. Nothing here sleeps: threads meet at events and queues."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.core.errors import EngineClosed, InvalidRequest, PacelineError
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request, SpeculationFlags
from paceline.engine import loop as engine_loop
from paceline.engine.engine import Engine
from paceline.engine.loop import EngineLoop
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from tests.engine.harness import MODEL, PROMPT, request
from tests.exactness.suite import mixed_requests, plain_text
from tests.fakes import TINY, IdleTasks, draft_model, tiny_engine, tiny_model

TIMEOUT = 30.0


class Inbox:
    """A listener, and what it heard."""

    def __init__(self, choices: int = 1) -> None:
        self.events: SimpleQueue[OutputEvent] = SimpleQueue()
        self._unfinished = choices

    def __call__(self, event: OutputEvent) -> None:
        self.events.put(event)

    def next(self) -> OutputEvent:
        return self.events.get(timeout=TIMEOUT)

    def tokens(self) -> dict[int, list[int]]:
        """By choice, once all have ended."""
        tokens: dict[int, list[int]] = {}
        while self._unfinished:
            event = self.next()
            if isinstance(event, PacelineError):
                raise event
            tokens.setdefault(event.choice, []).extend(event.tokens)
            self._unfinished -= event.finish_reason is not None
        return tokens


@contextmanager
def running(engine: Engine | None = None) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine or tiny_engine(MODEL, draft_model(tiny_model(perturb=0.2)), max_num_seqs=4))
    try:
        yield loop
    finally:
        loop.close()


def on_engine_thread(loop: EngineLoop, look: Callable[[], Any]) -> Any:
    """What `look` returns, or raises, between two steps."""
    seen: Future[Any] = Future()

    def command() -> None:
        try:
            seen.set_result(look())
        except BaseException as error:
            seen.set_exception(error)

    loop.call(command)
    return seen.result(TIMEOUT)


def assert_idle(loop: EngineLoop) -> None:
    engine = loop.engine
    pool = engine.scheduler.tables.pool
    pool.check()
    assert not engine.has_work
    assert pool.num_free == pool.num_blocks
    assert (engine.requests.output._sequences, engine.requests.sequences, loop._callers) == ({}, {}, {})
    for proposer in engine.speculator.proposers.values():
        if isinstance(proposer, DraftModelProposer):
            assert proposer.num_free_blocks == proposer.drafter.runner.num_blocks


class Gated:
    """Holds an engine at the start of every step until told to go on."""

    def __init__(self, engine: Engine) -> None:
        self.entered = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._advance = engine.advance
        engine.advance = self.advance  # type: ignore[method-assign]

    def advance(self) -> list[StepOutput]:
        self.entered.release()
        assert self._go.acquire(timeout=TIMEOUT)
        return self._advance()

    def wait(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT)

    def go(self, steps: int = 1) -> None:
        self._go.release(steps)


def test_a_request_comes_out_whole_and_in_order() -> None:
    one = request("r", PROMPT, max_tokens=20, seed=1, n=3)
    with running() as loop:
        inbox = Inbox(choices=3)
        loop.submit(one, inbox)
        tokens = inbox.tokens()
        assert {("r", choice): text for choice, text in tokens.items()} == plain_text(MODEL, [one])
        on_engine_thread(loop, lambda: assert_idle(loop))


def test_commands_without_work_do_not_delay_idle_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway asks a worker for its state several times a second."""
    monkeypatch.setattr(engine_loop, "IDLE_AFTER", 0.05)
    with running() as loop:
        done = threading.Event()
        on_engine_thread(loop, lambda: loop.engine.hooks.add(IdleTasks([done.set])))
        deadline = time.monotonic() + TIMEOUT
        while not done.is_set() and time.monotonic() < deadline:
            on_engine_thread(loop, lambda: None)
        assert done.is_set()


def test_an_error_that_only_the_engine_finds_goes_to_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(one: Request, grammar: object) -> None:
        raise InvalidRequest("not this one")

    with running() as loop:
        monkeypatch.setattr(loop.engine, "add", refuse)
        inbox = Inbox()
        loop.submit(request("r", PROMPT), inbox)
        assert str(inbox.next()) == "not this one"
        on_engine_thread(loop, lambda: assert_idle(loop))


def test_an_id_is_taken_until_its_last_choice_was_heard() -> None:
    gate = Gated(engine := tiny_engine(MODEL))
    with running(engine) as loop:
        inbox = Inbox(choices=2)
        loop.submit(request("r", PROMPT, max_tokens=2, n=2), inbox)
        gate.wait()
        with pytest.raises(InvalidRequest, match="already running"):
            loop.submit(request("r", PROMPT), Inbox())
        gate.go(100)
        assert len(inbox.tokens()) == 2
        again = Inbox()
        loop.submit(request("r", PROMPT, max_tokens=2), again)
        assert len(again.tokens()[0]) == 2


def test_many_threads_submit_and_cancel_at_once() -> None:
    requests = mixed_requests(24, TINY.vocab_size, max_tokens=10)
    expected = plain_text(MODEL, requests)
    with running() as loop:

        def call(part: int) -> None:
            rng = random.Random(part)
            for one in requests[part::6]:
                inbox = Inbox(choices=one.sampling.n)
                valid = loop.engine.validate(one)
                loop.submit(valid, inbox)
                doomed = replace(valid, id=f"{one.id}-doomed")
                heard: list[OutputEvent] = []
                first = threading.Event()
                loop.submit(doomed, lambda event, heard=heard, first=first: (heard.append(event), first.set()))
                if rng.random() < 0.5:  # at once, or in the middle
                    assert first.wait(TIMEOUT)
                loop.cancel(doomed.id)
                loop.cancel("unknown")
                for choice, tokens in inbox.tokens().items():
                    assert tokens == expected[one.id, choice]
                assert not any(isinstance(event, PacelineError) for event in heard)

        with ThreadPoolExecutor(6) as threads:
            for done in [threads.submit(call, part) for part in range(6)]:
                done.result(TIMEOUT)
        on_engine_thread(loop, lambda: assert_idle(loop))


def test_a_cancelled_request_is_not_heard_of_again() -> None:
    gate = Gated(engine := tiny_engine(MODEL))
    with running(engine) as loop:
        inbox = Inbox()
        loop.submit(request("r", PROMPT, max_tokens=50), inbox)
        gate.wait()
        gate.go()
        inbox.next()
        gate.wait()
        loop.cancel("r")  # while a step is under way that adds to it
        gate.go(100)
        on_engine_thread(loop, lambda: assert_idle(loop))
        assert inbox.events.empty()


def test_a_late_cancel_does_not_hit_the_next_request_of_the_same_id() -> None:
    """A request is cancelled during its last step. Before the command is carried out, its id is another's."""
    gate = Gated(engine := tiny_engine(MODEL))
    with running(engine) as loop:
        first, again, other = Inbox(), Inbox(), Inbox()

        def reuse(event: OutputEvent) -> None:  # heard in the same step as the end of the first "r", just after it
            if other.events.empty():
                loop.submit(request("r", PROMPT, max_tokens=3), again)
            other(event)

        loop.submit(request("r", PROMPT, max_tokens=2), first)
        gate.wait()
        loop.submit(request("other", PROMPT), reuse)
        gate.go()
        gate.wait()
        loop.cancel("r")
        gate.go(100)
        assert len(again.tokens()[0]) == 3
        assert isinstance(first.next(), StepOutput)
        assert first.events.empty()  # the end of it came after `cancel`


def test_a_listener_that_raises_loses_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    with running() as loop:
        calls: list[OutputEvent] = []

        def broken(event: OutputEvent) -> None:
            calls.append(event)
            raise RuntimeError("the listener is gone")

        good = Inbox()
        loop.submit(request("bad", PROMPT, max_tokens=30, n=2, seed=1), broken)
        loop.submit(request("good", PROMPT, max_tokens=30, seed=2), good)
        tokens = good.tokens()[0]
        assert {("good", 0): tokens} == plain_text(MODEL, [request("good", PROMPT, max_tokens=30, seed=2)])
        on_engine_thread(loop, lambda: assert_idle(loop))
        assert len(calls) == 1
    assert "a listener failed" in caplog.text


def test_a_failed_engine_reports_the_reason_to_every_listener(caplog: pytest.LogCaptureFixture) -> None:
    engine = tiny_engine(MODEL, max_num_seqs=2)
    forward, passes = engine.runner.forward, []

    def failing(*arguments: Any) -> Any:
        passes.append(1)
        if len(passes) >= 3:
            raise RuntimeError("the device fell off")
        return forward(*arguments)

    engine.runner.forward = failing  # type: ignore[method-assign]
    gate = Gated(engine)
    with running(engine) as loop:
        inboxes = [Inbox() for _ in range(4)]
        loop.submit(request("r0", PROMPT, max_tokens=50), inboxes[0])
        gate.wait()
        for i, inbox in enumerate(inboxes[1:], start=1):  # running, waiting, and not even added
            loop.submit(request(f"r{i}", PROMPT, max_tokens=50), inbox)
        gate.go(100)
        for inbox in inboxes:
            while not isinstance(event := inbox.next(), EngineClosed):
                assert isinstance(event, StepOutput)
            assert "the device fell off" not in str(event)  # it may quote a request, and every caller receives it
            assert isinstance(event.__cause__, RuntimeError)
            assert inbox.events.empty()
        with pytest.raises(EngineClosed):
            loop.submit(request("late", PROMPT), Inbox())
        with pytest.raises(EngineClosed):
            loop.cancel("r0")
    assert "the engine failed" in caplog.text


def test_closing_while_running_ends_every_request() -> None:
    engine = tiny_engine(MODEL, draft_model(MODEL), max_num_seqs=1)
    gate, loop = Gated(engine), EngineLoop(engine)
    inboxes = [Inbox(), Inbox()]
    loop.submit(request("r0", PROMPT, max_tokens=200), inboxes[0])
    gate.wait()
    loop.submit(request("r1", PROMPT), inboxes[1])
    closing, join = threading.Event(), loop._thread.join
    loop._thread.join = lambda: (closing.set(), join(TIMEOUT))  # type: ignore[method-assign, assignment, return-value]
    closer = threading.Thread(target=loop.close)
    closer.start()
    assert closing.wait(TIMEOUT)
    with pytest.raises(EngineClosed):
        loop.submit(request("r2", PROMPT), Inbox())
    gate.go()
    closer.join(TIMEOUT)
    assert isinstance(inboxes[0].next(), StepOutput)  # of the step that was under way
    for inbox in inboxes:
        event = inbox.next()
        assert isinstance(event, EngineClosed)
        assert "shut down" in str(event)
        assert inbox.events.empty()
    assert_idle(loop)
    loop.close()


def test_submitting_after_close_is_refused() -> None:
    with running() as loop:
        pass
    for use in (lambda: loop.submit(request("r", PROMPT), Inbox()), lambda: loop.cancel("r"), lambda: loop.call(print)):
        with pytest.raises(EngineClosed, match="shut down"):
            use()


def test_a_listener_may_close_the_loop() -> None:
    with running() as loop:
        heard: SimpleQueue[OutputEvent] = SimpleQueue()

        def close(event: OutputEvent) -> None:
            heard.put(event)
            loop.close()

        loop.submit(request("r", PROMPT, max_tokens=50), close)
        assert isinstance(heard.get(timeout=TIMEOUT), StepOutput)
        assert isinstance(heard.get(timeout=TIMEOUT), EngineClosed)


def test_commands_run_between_steps() -> None:
    with running() as loop:
        inbox = Inbox()
        loop.submit(request("r", PROMPT, max_tokens=40, temperature=0.0), inbox)
        loop.call(lambda: loop.engine.flags.apply(SpeculationFlags(enabled=False)))
        tokens = inbox.tokens()[0]
        assert {("r", 0): tokens} == plain_text(MODEL, [request("r", PROMPT, max_tokens=40, temperature=0.0)])
        assert on_engine_thread(loop, lambda: loop.engine.speculator.enabled) is False


def test_run_returns_when_the_engine_s_thread_has_done_it() -> None:
    loop = EngineLoop(tiny_engine(MODEL))
    ran: list[str] = []
    loop.run(lambda: ran.append(threading.current_thread().name))
    assert ran == ["paceline-engine"]
    loop.run(loop.close)
    with pytest.raises(EngineClosed, match="make a new LLM"):
        loop.run(lambda: None)


def test_run_raises_the_error_of_its_command() -> None:
    loop = EngineLoop(tiny_engine(MODEL))
    with pytest.raises(KeyError, match="what fails"):
        loop.run(lambda: {}["what fails"])
    inbox = Inbox()
    loop.submit(request("r", PROMPT, max_tokens=2), inbox)  # the engine continues
    assert len(inbox.tokens()[0]) == 2
    loop.close()


def test_a_request_joins_a_step_that_can_wait(monkeypatch):
    """The first request alone would wait for a minute: the second one is in its first step."""
    can_wait = property(lambda engine: 60.0 if len(engine.scheduler.waiting) == 1 else 0.0)
    monkeypatch.setattr(Engine, "seconds_to_spare", can_wait)
    with running() as loop:
        first, second = Inbox(), Inbox()
        loop.submit(request("first", PROMPT, max_tokens=2), first)
        loop.submit(request("second", PROMPT, max_tokens=2), second)
        outputs = first.next(), second.next()
    assert isinstance(outputs[0], StepOutput)
    assert isinstance(outputs[1], StepOutput)
    assert outputs[0].times is outputs[1].times


def test_outputs_are_heard_before_the_next_step_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    events = list[str]()
    with running() as loop:
        engine, inbox = loop.engine, Inbox()
        prepare = engine.speculator.prepare_next

        def recorded(*arguments: Any, **options: Any) -> None:
            events.append("prepared")
            prepare(*arguments, **options)

        def listen(event: OutputEvent) -> None:
            events.append("heard")
            inbox(event)

        monkeypatch.setattr(engine.speculator, "prepare_next", recorded)
        loop.submit(request("r", PROMPT, max_tokens=3), listen)
        inbox.tokens()
        on_engine_thread(loop, lambda: None)
    assert events[:4] == ["heard", "prepared"] * 2
