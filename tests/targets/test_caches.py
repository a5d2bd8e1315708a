"""KV-aware routing with real workers, sockets and events."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from paceline.core.clock import WallClock
from paceline.core.request import Request, ValidatedRequest
from paceline.engine.loop import EngineLoop
from paceline.targets.caches import CacheTracker
from paceline.targets.pool import TargetPool
from paceline.wire.gateway_messages import TO_TARGET_WORKER
from paceline.wire.kv_events import KvPublisher
from tests.engine.harness import GREEDY, engine_of, outputs_of, request, tokens_of
from tests.processes.target_harness import (
    LossyListener,
    Members,
    StreamReader,
    WorkerThread,
    cluster,
    engine_server,
    pool_of,
    until,
)

SYSTEM = [3 + i % 30 for i in range(100)]


class PublishingWorker(WorkerThread):
    """A worker that publishes KV events."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.engine = engine_of(tokenizer=True)
        self.gate = None
        self.listener = LossyListener(f"tcp://127.0.0.1:{port}", TO_TARGET_WORKER)
        self.publisher = KvPublisher("tcp://127.0.0.1:0", f"{name}@{id(self)}")
        self.worker = engine_server(name, EngineLoop(self.engine), self.listener, publisher=self.publisher)
        self._start()

    @property
    def num_cached(self) -> int:
        return self.engine.scheduler.tables.pool.num_cached


@contextmanager
def kv_aware(*workers: WorkerThread) -> Iterator[TargetPool]:
    with pool_of(*workers, router="kv_aware") as pool:
        yield pool


def tracker_of(pool: TargetPool) -> CacheTracker:
    return pool._caches


def is_current(pool: TargetPool, worker: PublishingWorker) -> bool:
    return tracker_of(pool).index.num_blocks(worker.worker.name) == worker.num_cached


def make_request(name: str, tail: int, salt: str = "") -> ValidatedRequest:
    one = request(name, [*SYSTEM, tail], **{**GREEDY, "max_tokens": 4})
    return replace(one, cache_salt=salt)


def num_cached_tokens(pool: TargetPool, one: Request) -> int:
    return StreamReader(pool, one).read_all()[-1].num_cached


def test_a_prefix_is_computed_once_and_requests_go_to_its_worker() -> None:
    workers = [PublishingWorker(name) for name in "abc"]
    with kv_aware(*workers) as pool:
        assert num_cached_tokens(pool, make_request("0", 0)) == 0
        for i in range(1, 7):
            until(lambda: all(is_current(pool, worker) for worker in workers))
            assert num_cached_tokens(pool, make_request(f"{i}", i)) == 96
        assert sum(worker.num_cached > 0 for worker in workers) == 1


def test_the_text_equals_that_of_one_engine() -> None:
    requests = [make_request(f"{i}", i % 3) for i in range(9)]
    expected = [tokens_of(outputs_of(engine_of(tokenizer=True), one), one.id, 0) for one in requests]
    with kv_aware(PublishingWorker("a"), PublishingWorker("b")) as pool:
        outputs = StreamReader(pool, *requests).read_all()
    assert [tokens_of(outputs, one.id, 0) for one in requests] == expected


def test_tenants_share_no_blocks() -> None:
    workers = [PublishingWorker(name) for name in "ab"]
    with kv_aware(*workers) as pool:
        assert num_cached_tokens(pool, make_request("0", 0, "red")) == 0
        until(lambda: all(is_current(pool, worker) for worker in workers))
        assert sum(worker.num_cached > 0 for worker in workers) == 1
        assert num_cached_tokens(pool, make_request("1", 1, "blue")) == 0
        assert all(worker.num_cached for worker in workers)  # red's prefix did not attract blue's request
        until(lambda: all(is_current(pool, worker) for worker in workers))
        assert num_cached_tokens(pool, make_request("2", 2, "red")) == 96


def test_a_restarted_worker_counts_as_empty() -> None:
    a, b = PublishingWorker("a"), PublishingWorker("b")
    with kv_aware(a, b) as pool:
        num_cached_tokens(pool, make_request("0", 0))
        until(lambda: is_current(pool, a) and is_current(pool, b))
        holder = a if a.num_cached else b
        holder.stop()
        until(lambda: not pool.targets()[holder.worker.name].is_usable)
        again = PublishingWorker(holder.worker.name, holder.port)
        try:
            until(lambda: pool.targets()[again.worker.name].is_usable and is_current(pool, again))
            assert num_cached_tokens(pool, make_request("1", 1)) == 0
            until(lambda: sum(is_current(pool, worker) for worker in (again, a if holder is b else b)) == 2)
            assert num_cached_tokens(pool, make_request("2", 2)) == 96
        finally:
            again.stop()


def test_a_second_gateway_learns_the_cache() -> None:
    worker = PublishingWorker("a")
    with kv_aware(worker) as first:
        num_cached_tokens(first, make_request("0", 0))
        with pool_without_stopping(worker) as second:
            until(lambda: is_current(second, worker) and worker.num_cached > 0)
            assert num_cached_tokens(second, make_request("1", 1)) == 96


def test_a_restarted_gateway_learns_what_changed_meanwhile() -> None:
    worker = PublishingWorker("a")
    try:
        with pool_without_stopping(worker) as before:
            num_cached_tokens(before, make_request("0", 0, "red"))
            until(lambda: is_current(before, worker) and worker.num_cached > 0)
            had = worker.num_cached
        for i in range(40):  # twice as many blocks as there are
            outputs_of_loop(worker, make_request(f"{i}", i % 3, f"{i}"))
        assert had < worker.num_cached <= worker.engine.scheduler.tables.pool.num_blocks
        with pool_without_stopping(worker) as again:
            index = tracker_of(again).index
            # A full cache always has the same number of blocks, so wait for the last prefix too
            until(lambda: is_current(again, worker) and index.match(SYSTEM, "39").groups)
            assert not index.match(SYSTEM, "red").groups
            assert num_cached_tokens(again, make_request("again", 1, "39")) == 96
    finally:
        worker.stop()


def outputs_of_loop(worker: PublishingWorker, one: Request) -> None:
    """Run a request as if another gateway had sent it."""
    done = threading.Event()
    worker.backend._loop.submit(one, lambda event: done.set() if event.finish_reason else None)
    assert done.wait(60)


class LossySocket:
    """A publisher's socket that drops batches while `loses` is set."""

    def __init__(self, publisher: KvPublisher) -> None:
        self.loses = False
        self.lost = 0
        self._socket = publisher._pub
        publisher._pub = self  # type: ignore[assignment]

    def send_multipart(self, frames: list[bytes]) -> None:
        if self.loses:
            self.lost += 1
        else:
            self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()


def test_lost_batches_are_replayed() -> None:
    worker = PublishingWorker("a")
    wire = LossySocket(worker.publisher)
    with kv_aware(worker) as pool:
        num_cached_tokens(pool, make_request("0", 0, "red"))
        until(lambda: is_current(pool, worker) and worker.num_cached > 0)
        wire.loses = True
        num_cached_tokens(pool, make_request("1", 1, "blue"))
        until(lambda: wire.lost > 0)
        wire.loses = False  # the number of the next batch, even of an empty one, shows the loss
        until(lambda: is_current(pool, worker))
        assert tracker_of(pool).index.num_orphans == 0
        assert (
            num_cached_tokens(pool, make_request("2", 2, "red"))
            == num_cached_tokens(pool, make_request("3", 2, "blue"))
            == 96
        )


@contextmanager
def pool_without_stopping(worker: PublishingWorker) -> Iterator[TargetPool]:
    pool = TargetPool(cluster(router="kv_aware"), Members(worker))
    try:
        until(lambda: all(target.is_usable for target in pool.targets().values()) and bool(pool.targets()))
        yield pool
    finally:
        pool.close()


def test_workers_without_events_get_requests_too() -> None:
    with kv_aware(WorkerThread("a"), WorkerThread("b")) as pool:
        assert len(StreamReader(pool, *(make_request(f"{i}", i) for i in range(4))).read_all()) >= 4
        assert len(tracker_of(pool).index) == 0


def test_a_worker_is_tracked_once() -> None:
    worker = PublishingWorker("a")
    with kv_aware(worker) as pool:
        target = pool.targets()["a"]
        tracker = CacheTracker(None, WallClock())
        assert target.welcome is not None
        tracker.track(target.member, target.welcome)
        [subscriber] = tracker._subscribers.values()
        tracker.track(target.member, target.welcome)
        assert [subscriber] == list(tracker._subscribers.values())
        tracker.close()
