"""Routing by what is cached, with real workers, sockets and events."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.runtime.kv_events.follower import CacheFollower

from paceline.core.clock import WallClock
from paceline.core.request import Request
from paceline.engine.loop import EngineLoop
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.kv_events.publisher import KvPublisher
from paceline.runtime.target_worker.worker import TargetWorker
from paceline.runtime.wire.stream_messages import TO_TARGET_WORKER
from tests.engine.harness import GREEDY, engine_of, outputs_of, request, tokens_of
from tests.runtime.target_harness import LossyListener, Members, StreamReader, WorkerThread, cluster, pool_of, until

SYSTEM = [3 + i % 30 for i in range(100)]


class Publishing(WorkerThread):
    """A worker that says what is in its cache."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.engine = engine_of(tokenizer=True)
        self.gate = None
        self.listener = LossyListener(f"tcp://127.0.0.1:{port}", TO_TARGET_WORKER)
        self.publisher = KvPublisher("tcp://127.0.0.1:0", f"{name}@{id(self)}")
        self.worker = TargetWorker(name, EngineLoop(self.engine), self.listener, publisher=self.publisher)
        self._start()

    @property
    def num_cached(self) -> int:
        return self.engine.scheduler.tables.pool.num_cached


@contextmanager
def kv_aware(*workers: WorkerThread) -> Iterator[TargetPool]:
    with pool_of(*workers, router="kv_aware") as pool:
        yield pool


def index_of(pool: TargetPool) -> CacheFollower:
    return pool._caches


def knows(pool: TargetPool, worker: Publishing) -> bool:
    return index_of(pool).index.num_blocks(worker.worker.name) == worker.num_cached


def asked(name: str, tail: int, salt: str = "") -> Request:
    one = request(name, [*SYSTEM, tail], **{**GREEDY, "max_tokens": 4})
    return Request(one.id, one.prompt_ids, one.sampling, cache_salt=salt)


def cached(pool: TargetPool, one: Request) -> int:
    return StreamReader(pool, one).read_all()[-1].num_cached


def test_a_prefix_is_computed_once_and_found_where_it_is() -> None:
    workers = [Publishing(name) for name in "abc"]
    with kv_aware(*workers) as pool:
        assert cached(pool, asked("0", 0)) == 0
        for i in range(1, 7):
            until(lambda: all(knows(pool, worker) for worker in workers))
            assert cached(pool, asked(f"{i}", i)) == 96
        assert sum(worker.num_cached > 0 for worker in workers) == 1


def test_the_text_is_that_of_one_engine() -> None:
    requests = [asked(f"{i}", i % 3) for i in range(9)]
    expected = [tokens_of(outputs_of(engine_of(tokenizer=True), one), one.id, 0) for one in requests]
    with kv_aware(Publishing("a"), Publishing("b")) as pool:
        outputs = StreamReader(pool, *requests).read_all()
    assert [tokens_of(outputs, one.id, 0) for one in requests] == expected


def test_tenants_share_nothing() -> None:
    workers = [Publishing(name) for name in "ab"]
    with kv_aware(*workers) as pool:
        assert cached(pool, asked("0", 0, "red")) == 0
        until(lambda: all(knows(pool, worker) for worker in workers))
        assert sum(worker.num_cached > 0 for worker in workers) == 1
        assert cached(pool, asked("1", 1, "blue")) == 0
        assert all(worker.num_cached for worker in workers)  # red's prefix drew nobody to its worker
        until(lambda: all(knows(pool, worker) for worker in workers))
        assert cached(pool, asked("2", 2, "red")) == 96


def test_a_worker_that_started_anew_is_known_to_have_nothing() -> None:
    a, b = Publishing("a"), Publishing("b")
    with kv_aware(a, b) as pool:
        cached(pool, asked("0", 0))
        until(lambda: knows(pool, a) and knows(pool, b))
        home = a if a.num_cached else b
        home.stop()
        until(lambda: not pool.targets()[home.worker.name].is_usable)
        again = Publishing(home.worker.name, home.port)
        try:
            until(lambda: pool.targets()[again.worker.name].is_usable and knows(pool, again))
            assert cached(pool, asked("1", 1)) == 0
            until(lambda: sum(knows(pool, worker) for worker in (again, a if home is b else b)) == 2)
            assert cached(pool, asked("2", 2)) == 96
        finally:
            again.stop()


def test_a_gateway_that_comes_later_is_told_what_there_is() -> None:
    worker = Publishing("a")
    with kv_aware(worker) as first:
        cached(first, asked("0", 0))
        with pool_without_stopping(worker) as second:
            until(lambda: knows(second, worker) and worker.num_cached > 0)
            assert cached(second, asked("1", 1)) == 96


def test_a_restarted_gateway_knows_what_changed_while_nobody_listened() -> None:
    worker = Publishing("a")
    try:
        with pool_without_stopping(worker) as before:
            cached(before, asked("0", 0, "red"))
            until(lambda: knows(before, worker) and worker.num_cached > 0)
            had = worker.num_cached
        for i in range(40):  # twice as many blocks as there are
            outputs_of_loop(worker, asked(f"{i}", i % 3, f"{i}"))
        assert had < worker.num_cached <= worker.engine.scheduler.tables.pool.num_blocks
        with pool_without_stopping(worker) as again:
            index = index_of(again).index
            # A full cache always holds as many: the count alone does not tell that the last of them was reader of
            until(lambda: knows(again, worker) and index.match(SYSTEM, "39").groups)
            assert not index.match(SYSTEM, "red").groups
            assert cached(again, asked("again", 1, "39")) == 96
    finally:
        worker.stop()


def outputs_of_loop(worker: Publishing, one: Request) -> None:
    """As if another gateway had asked."""
    done = threading.Event()
    worker.worker._loop.submit(one, lambda event: done.set() if event.finish_reason else None)  # type: ignore[union-attr]
    assert done.wait(60)


class Lossy:
    """A publisher's socket on a network that loses what it is told to."""

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


def test_batches_lost_on_the_way_are_made_up_for() -> None:
    worker = Publishing("a")
    wire = Lossy(worker.publisher)
    with kv_aware(worker) as pool:
        cached(pool, asked("0", 0, "red"))
        until(lambda: knows(pool, worker) and worker.num_cached > 0)
        wire.loses = True
        cached(pool, asked("1", 1, "blue"))
        until(lambda: wire.lost > 0)
        wire.loses = False  # the next batch, be it an empty one, has a number that tells
        until(lambda: knows(pool, worker))
        assert index_of(pool).index.num_orphans == 0
        assert cached(pool, asked("2", 2, "red")) == cached(pool, asked("3", 2, "blue")) == 96


@contextmanager
def pool_without_stopping(worker: Publishing) -> Iterator[TargetPool]:
    pool = TargetPool(cluster(router="kv_aware"), Members(worker))
    try:
        until(lambda: all(line.is_usable for line in pool.targets().values()) and bool(pool.targets()))
        yield pool
    finally:
        pool.close()


def test_workers_that_publish_nothing_are_served_all_the_same() -> None:
    with kv_aware(WorkerThread("a"), WorkerThread("b")) as pool:
        assert len(StreamReader(pool, *(asked(f"{i}", i) for i in range(4))).read_all()) >= 4
        assert len(index_of(pool).index) == 0


def test_nobody_is_followed_twice() -> None:
    worker = Publishing("a")
    with kv_aware(worker) as pool:
        line = pool.targets()["a"]
        follower = CacheFollower(None, WallClock())
        assert line.welcome is not None
        follower.follow(line.member, line.welcome)
        [subscriber] = follower._subscribers.values()
        follower.follow(line.member, line.welcome)
        assert [subscriber] == list(follower._subscribers.values())
        follower.close()
