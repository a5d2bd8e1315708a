"""A target that is still loading: its status, and which worker gets requests."""

import threading
from collections.abc import Callable

import pytest

from paceline.core.errors import EngineClosed
from paceline.core.request import Request, SamplingParams
from paceline.targets.pool import TargetPool
from paceline.wire.gateway_messages import LoadProgress
from paceline.worker.server.backend import WorkerFailed
from tests.processes.target_harness import StreamReader, WorkerThread, pool_of, until


class FakeWeights:
    """Progress set by the test."""

    address = ""
    error: Exception | None = None

    def __init__(self, progress: LoadProgress | None) -> None:
        self.progress = progress
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def running(name: str, progress: LoadProgress | None = None) -> tuple[WorkerThread, FakeWeights]:
    weights = FakeWeights(progress)
    one = WorkerThread(name)
    one.backend._weights = weights  # type: ignore[assignment]
    return one, weights


def state(pool: TargetPool, name: str) -> str:
    return next(worker.state for worker in pool.workers() if worker.name == name)


def is_state(pool: TargetPool, name: str, expected: str) -> Callable[[], bool]:
    return lambda: state(pool, name) == expected


def requests(count: int) -> list[Request]:
    return [Request(f"r{i}", (5, 11, 2), SamplingParams(max_tokens=4, seed=i, ignore_eos=True)) for i in range(count)]


def test_status_shows_load_progress() -> None:
    one, weights = running("target-0", LoadProgress(12, 30, 2))
    with pool_of(one) as pool:
        until(is_state(pool, "target-0", "loading 12/30 layers from 2 peers"))
        weights.progress = LoadProgress(13, 30, 1)
        until(is_state(pool, "target-0", "loading 13/30 layers from 1 peer"))
        weights.progress = LoadProgress(13, 30, 1, in_place=1)
        until(is_state(pool, "target-0", "loading 13/30 layers from 1 peer in place"))
        weights.progress = LoadProgress(14, 30, 0)
        until(is_state(pool, "target-0", "loading 14/30 layers from disk"))
        weights.progress = LoadProgress(30, 30, 0)
        until(is_state(pool, "target-0", "warming up"))
        weights.progress = None
        until(is_state(pool, "target-0", "ready"))
    assert weights.closed.is_set()


def test_a_loading_worker_gets_requests_only_if_no_other_is_ready() -> None:
    one, _ = running("target-0", LoadProgress(12, 30, 2))
    other, _ = running("target-1")
    with pool_of(one, other) as pool:
        until(is_state(pool, "target-0", "loading 12/30 layers from 2 peers"))
        StreamReader(pool, *requests(6)).read_all()
        assert (one.engine.num_steps > 0, other.engine.num_steps > 0) == (False, True)
        other.stop()
        until(lambda: state(pool, "target-1") != "ready")
        StreamReader(pool, *requests(2)).read_all()
        assert one.engine.num_steps > 0


class Unstarted(WorkerThread):
    def _start(self) -> None:
        pass


def test_a_worker_whose_model_cannot_load_stops() -> None:
    unstarted = Unstarted("target-0")
    weights = FakeWeights(LoadProgress(3, 30, 1))
    weights.error = EngineClosed("no peer is left")
    unstarted.backend._weights = weights  # type: ignore[assignment]
    with pytest.raises(WorkerFailed, match="target-0 failed to load its model: no peer is left"):
        unstarted.worker.run()
    assert weights.closed.is_set()
