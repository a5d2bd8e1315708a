"""Weights of running target workers, changed by a gateway over real sockets."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import PacelineError, UnsupportedModel, WeightsChanged
from paceline.core.output import OutputEvent, StepOutput
from paceline.core.request import Request
from paceline.core.status import WeightsStatus
from paceline.models.loading.load import LoadedModel
from paceline.targets.pool import TargetPool
from paceline.wire.gateway_messages import ChangeWeights
from paceline.worker.server.weights_change import WeightsChanges
from tests.engine.harness import SAMPLED, letters, request
from tests.fakes import TINY, run, tiny_engine, tiny_model
from tests.processes.target_harness import WAIT, Members, StreamReader, WorkerThread, fingerprint, pool_of, until
from tests.specs import changed

OLD, NEW = 0, 7
"""Seeds of the weights."""
CHANGE = ChangeWeights(5, "new", "", WAIT)


def load(change: ChangeWeights) -> LoadedModel:
    if change.folder == "broken":
        raise UnsupportedModel("no config.json")
    model = tiny_model(seed=NEW)
    return LoadedModel("new", model.config, model, letters(), "2")


def worker(name: str, load: Callable[[ChangeWeights], LoadedModel] = load, steps: int | None = None) -> WorkerThread:
    engine = tiny_engine(tiny_model(seed=OLD), tokenizer=letters(), max_num_seqs=4)
    engine.fingerprint = fingerprint("1")
    made = WorkerThread(name, engine, steps=steps)
    made.run(lambda: install(made, WeightsChanges(made.backend._loop, load)))
    return made


def install(made: WorkerThread, changes: WeightsChanges) -> None:
    made.backend._weights_changes = changes
    changes.attach(made.backend._lifecycle.wake)


def asked(name: str, count: int = 12) -> Request:
    return request(name, (5, 11, 2, 30, 7), **SAMPLED, max_tokens=count, ignore_eos=True)


def text(seed: int, name: str, count: int = 12) -> list[int]:
    return run(tiny_engine(tiny_model(seed=seed), tokenizer=letters()), [asked(name, count)]).tokens[name, 0]


def statuses(pool: TargetPool) -> dict[str, WeightsStatus | None]:
    return {report.name: report.status.weights for report in pool.reports()}


def finished(pool: TargetPool, *names: str) -> bool:
    found = statuses(pool)
    return all((status := found.get(name)) is not None and status.state in ("done", "failed") for name in names)


def tokens(outputs: list[StepOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.tokens]


@contextmanager
def gated(made: WorkerThread) -> Iterator[None]:
    assert made.gate is not None
    try:
        yield
    finally:
        made.gate.open()


def test_running_streams_are_finished_and_later_ones_get_the_new_weights() -> None:
    a = worker("a", steps=3)
    with pool_of(a) as pool, gated(a):
        reader = StreamReader(pool, asked("before"))
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        pool.change_weights(CHANGE)
        until(lambda: (status := statuses(pool).get("a")) is not None and status.state == "waiting")
        reader.submit(asked("after"))
        until(lambda: a.listener.num_submitted == 2)
        a.gate.open()
        outputs = reader.read_all()
        until(lambda: finished(pool, "a"))
        assert statuses(pool)["a"] == WeightsStatus(5, "new", "done")
        assert tokens(outputs, "before") == text(OLD, "before")
        assert tokens(outputs, "after") == text(NEW, "after")
        assert {o.fingerprint for o in outputs if o.request_id == "before"} == {fingerprint("1").digest}
        assert {o.fingerprint for o in outputs if o.request_id == "after"} == {fingerprint("2").digest}
        assert pool.fingerprint == fingerprint("2").digest
        pool.change_weights(CHANGE)  # the same number: nothing happens
        again = StreamReader(pool, asked("again")).read_all()
        assert tokens(again, "again") == text(NEW, "again")


def test_streams_that_take_too_long_are_told() -> None:
    a = worker("a", steps=3)
    with pool_of(a) as pool, gated(a):
        events: list[OutputEvent] = []
        told = threading.Event()

        def listen(event: OutputEvent) -> None:
            events.append(event)
            if isinstance(event, PacelineError):
                told.set()

        pool.submit(asked("long", 200), listen)  # type: ignore[arg-type]
        assert a.gate is not None
        assert a.gate.reached.wait(WAIT)
        pool.change_weights(ChangeWeights(5, "new", "", 0.0))
        until(lambda: (status := statuses(pool).get("a")) is not None and status.state == "waiting")
        a.gate.open()
        assert told.wait(WAIT)
        assert isinstance(events[-1], WeightsChanged)
        assert tokens(StreamReader(pool, asked("next")).read_all(), "next") == text(NEW, "next")


def test_all_workers_of_a_pool_change_and_so_does_one_that_joins_later() -> None:
    a, b, late = worker("a"), worker("b"), worker("late")
    with pool_of(a, b) as pool:
        assert isinstance(pool._watch.directory, Members)
        try:
            pool.change_weights(CHANGE)
            until(lambda: finished(pool, "a", "b") and pool.fingerprint == fingerprint("2").digest)
            pool.settle_weights(is_kept=True)
            pool.change_weights(ChangeWeights(6, "broken", "", WAIT))  # the one before it is kept
            until(lambda: all(s is not None and (s.number, s.state) == (6, "failed") for s in statuses(pool).values()))
            pool.settle_weights(is_kept=False)
            pool._watch.directory.known.append(late.member)
            until(lambda: "late" in pool.targets() and pool.targets()["late"].takes_streams)
            assert pool.fingerprint == fingerprint("2").digest
            outputs = StreamReader(pool, *(asked(f"r{i}") for i in range(6))).read_all()
            for i in range(6):
                assert tokens(outputs, f"r{i}") == text(NEW, f"r{i}")
            assert late.listener.num_submitted > 0
        finally:
            late.stop()


@pytest.mark.parametrize("error", [UnsupportedModel("no config.json"), RuntimeError("broken file")])
def test_weights_that_do_not_load_change_nothing(error: Exception) -> None:
    def fail(change: ChangeWeights) -> LoadedModel:
        raise error

    a = worker("a", fail)
    with pool_of(a) as pool:
        pool.change_weights(CHANGE)
        until(lambda: finished(pool, "a"))
        status = statuses(pool)["a"]
        assert status is not None
        assert (status.number, status.state) == (5, "failed")
        assert str(error) in status.reason
        pool.settle_weights(is_kept=False)
        assert pool.fingerprint == fingerprint("1").digest
        assert tokens(StreamReader(pool, asked("r")).read_all(), "r") == text(OLD, "r")


def test_weights_of_another_architecture_change_nothing() -> None:
    def other(change: ChangeWeights) -> LoadedModel:
        model = tiny_model(config=changed(TINY, num_layers=1))
        return LoadedModel("other", model.config, model, letters(), "2")

    a = worker("a", other)
    with pool_of(a) as pool:
        pool.change_weights(CHANGE)
        until(lambda: finished(pool, "a"))
        status = statuses(pool)["a"]
        assert status is not None
        assert "restart the server with the new model" in status.reason
        assert tokens(StreamReader(pool, asked("r")).read_all(), "r") == text(OLD, "r")


def test_an_obstacle_is_reported() -> None:
    a = worker("a")
    a.run(lambda: install(a, WeightsChanges(a.backend._loop, load, obstacle="not here")))
    with pool_of(a) as pool:
        pool.change_weights(CHANGE)
        until(lambda: finished(pool, "a"))
        assert statuses(pool)["a"] == WeightsStatus(5, "new", "failed", "not here")


def test_resumable_streams_of_the_old_weights_are_forgotten() -> None:
    a = worker("a")
    with pool_of(a) as pool:
        kept: dict[str, Any] = {"resume_key": "k" * 16}
        StreamReader(pool, replace(asked("r"), **kept)).read_all()
        assert a.backend._resumable.find("k" * 16) is not None
        pool.change_weights(CHANGE)
        until(lambda: finished(pool, "a"))
        assert a.backend._resumable.find("k" * 16) is None
