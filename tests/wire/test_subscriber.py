"""Publisher and subscriber over loopback, and a subscriber with a scripted worker."""

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.wire import kv_events as kv_publisher
from paceline.wire.keys import Security, generate_key_pair
from paceline.wire.kv_events import END, KvPublisher, encode
from paceline.wire.kv_subscriber import REPLAY_SECONDS, RETRY_SECONDS, KvSubscriber

LOCAL = "tcp://127.0.0.1:0"


def block(i: int) -> BlocksStored:
    return BlocksStored([i], i - 1 if i else None, [i] * 16)


class RecordingSubscriber:
    """A subscriber and the keys of the cache by its events, in order of arrival."""

    def __init__(self, address: str, replay: str | None, security: Security | None = None) -> None:
        self.clock = VirtualClock()
        self.keys: list[object] = []
        self.num_cleared = 0
        self.subscriber = KvSubscriber(address, replay, self.apply, self.clock, security)

    def apply(self, event: CacheEvent) -> None:
        match event:
            case CacheCleared():
                self.keys.clear()
                self.num_cleared += 1
            case BlocksStored():
                self.keys.extend(event.keys)
            case BlocksRemoved():
                self.keys = [key for key in self.keys if key not in event.keys]

    def until(self, done: Callable[[], bool], seconds: float = 10.0) -> None:
        poller = zmq.Poller()
        for socket in self.subscriber.sockets:
            poller.register(socket, zmq.POLLIN)
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"keys: {self.keys}"
            poller.poll(20)
            self.subscriber.receive()

    def close(self) -> None:
        self.subscriber.close()


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    publisher = KvPublisher(LOCAL, "w@1")
    yield publisher
    publisher.close()


def subscribe_to(publisher: KvPublisher) -> RecordingSubscriber:
    return RecordingSubscriber(publisher.address, publisher.replay_address)


def test_events_arrive_in_order(publisher: KvPublisher) -> None:
    recording = subscribe_to(publisher)
    for i in range(100):
        publisher.put(block(i))
    publisher.put(BlocksRemoved([99]))
    recording.until(lambda: len(recording.keys) == 99)
    assert recording.keys == list(range(99))
    publisher.put(block(99))
    recording.until(lambda: len(recording.keys) == 100)
    recording.close()


def test_a_late_subscriber_gets_earlier_batches(publisher: KvPublisher) -> None:
    first = subscribe_to(publisher)
    publisher.put(block(0))
    publisher.put(block(1))
    first.until(lambda: len(first.keys) == 2)
    second = subscribe_to(publisher)
    second.until(lambda: len(second.keys) == 2 and not second.subscriber.is_behind)
    publisher.put(block(2))
    for recording in (first, second):
        recording.until(lambda recording=recording: recording.keys == [0, 1, 2])  # type: ignore[misc]
        recording.close()


def test_a_subscriber_gets_the_whole_cache_if_batches_are_no_longer_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "MAX_KEPT_BATCHES", 1)
    publisher = KvPublisher(LOCAL, "w@1")
    first = subscribe_to(publisher)
    for i in range(5):
        publisher.put(block(i))
        first.until(lambda i=i: len(first.keys) == i + 1)  # type: ignore[misc]
    publisher.put(BlocksRemoved([4]))
    first.until(lambda: len(first.keys) == 4)
    second = subscribe_to(publisher)
    second.until(lambda: second.keys == [0, 1, 2, 3] and not second.subscriber.is_behind)
    publisher.put(block(4))
    second.until(lambda: second.keys == [0, 1, 2, 3, 4])
    for each in (first, second, publisher):
        each.close()


def test_a_restarted_worker_at_the_same_address_is_replayed_from_0() -> None:
    before = KvPublisher(LOCAL, "w@1")
    recording = subscribe_to(before)
    for i in range(3):
        before.put(block(i))
    recording.until(lambda: len(recording.keys) == 3)
    before.close()
    # A publisher chooses its ports, so the second run is scripted
    worker = FakeWorker(before.address, before.replay_address)
    recording.until(lambda: worker.pub.poll(0) != 0)  # the subscription is renewed at the next receive
    worker.send(0, CacheCleared())
    recording.until(lambda: not recording.keys)
    client, start = worker.next_request()
    assert start == 0
    worker.reply(client, [(0, [CacheCleared()]), (1, [block(7)])])
    recording.until(lambda: recording.keys == [7])
    recording.close()
    worker.close()


def test_a_restart_is_noticed_without_a_live_batch_of_the_first_run() -> None:
    worker = FakeWorker(topic=b"w@1")
    recording = RecordingSubscriber(worker.address, worker.replay_address)
    worker.wait_subscribed()
    worker.reply(worker.next_request()[0], [(0, [CacheCleared()]), (1, [block(0)])])
    recording.until(lambda: recording.keys == [0] and not recording.subscriber.is_behind)
    worker.topic = b"w@2"
    worker.send(0, CacheCleared())
    recording.until(lambda: not recording.keys)
    assert worker.next_request()[1] == 0
    recording.close()
    worker.close()


def test_only_allowed_keys_are_accepted() -> None:
    server, allowed, unknown = generate_key_pair(), generate_key_pair(), generate_key_pair()
    publisher = KvPublisher(LOCAL, "w@1", Security(server, allowed=frozenset({allowed.public})))
    addresses = publisher.address, publisher.replay_address
    publisher.put(block(0))
    accepted = RecordingSubscriber(*addresses, Security(allowed, server.public))
    accepted.until(lambda: accepted.keys == [0])
    refused = RecordingSubscriber(*addresses, Security(unknown, server.public))
    publisher.put(block(1))
    accepted.until(lambda: accepted.keys == [0, 1])
    assert not any(socket.poll(300) for socket in refused.subscriber.sockets)
    for each in (accepted, refused, publisher):
        each.close()


def test_without_keys_only_loopback_is_allowed() -> None:
    with pytest.raises(InvalidConfig, match="keys"):
        KvPublisher("tcp://0.0.0.0:0", "w@1")


def test_close_may_be_called_twice(publisher: KvPublisher) -> None:
    publisher.close()
    publisher.close()


class FakeWorker:
    """A scripted worker: PUB for batches, ROUTER for replay requests."""

    def __init__(self, address: str = LOCAL, replay: str = LOCAL, topic: bytes = b"") -> None:
        self.topic = topic
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pub, self.replay = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        for socket, where in ((self.pub, address), (self.replay, replay)):
            socket.linger = 0
            socket.bind(where)
        self.address, self.replay_address = (
            socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in (self.pub, self.replay)
        )

    def wait_subscribed(self) -> None:
        assert self.pub.poll(10_000)
        assert self.pub.recv() == b"\x01"

    def send(self, number: int, *events: CacheEvent) -> None:
        self.pub.send_multipart([self.topic, number.to_bytes(8, "big"), encode(events)])

    def next_request(self) -> tuple[bytes, int]:
        """The client of the next replay request, and its number."""
        assert self.replay.poll(10_000), "no replay was requested"
        worker, empty, number = self.replay.recv_multipart()
        assert empty == b""
        return worker, int.from_bytes(number, "big")

    def reply(self, worker: bytes, batches: list[tuple[int, list[CacheEvent]]]) -> None:
        topic = [self.topic] if self.topic else []  # vLLM before 0.26 sends none
        for number, events in batches:
            self.replay.send_multipart([worker, b"", *topic, number.to_bytes(8, "big"), encode(events)])
        self.replay.send_multipart([worker, b"", END, b""])

    def close(self) -> None:
        self.pub.close()
        self.replay.close()
        self._context.term()


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    worker = FakeWorker()
    yield worker
    worker.close()


def after_first_batch(worker: FakeWorker) -> RecordingSubscriber:
    """A subscriber that has batch 0, with block 0."""
    recording = RecordingSubscriber(worker.address, worker.replay_address)
    worker.wait_subscribed()
    client, start = worker.next_request()
    assert start == 0
    worker.reply(client, [(0, [block(0)])])
    recording.until(lambda: recording.keys == [0] and not recording.subscriber.is_behind)
    return recording


def test_a_gap_is_replayed(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.send(3, block(3))
    recording.until(lambda: recording.subscriber.is_behind)
    worker.send(4, block(4))
    client, start = worker.next_request()
    assert start == 1
    worker.reply(client, [(1, [block(1)]), (2, [block(2)]), (3, [block(3)])])
    recording.until(lambda: len(recording.keys) == 5)
    assert recording.keys == [0, 1, 2, 3, 4]
    assert recording.num_cleared == 1
    recording.close()


def test_batches_that_were_replayed_are_dropped_when_they_arrive(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.send(2, block(2))
    recording.until(lambda: recording.subscriber.is_behind)
    worker.reply(worker.next_request()[0], [(i, [block(i)]) for i in (1, 2, 3)])
    recording.until(lambda: len(recording.keys) == 4)
    worker.send(3, block(3))
    worker.send(4, block(4))
    recording.until(lambda: len(recording.keys) == 5)
    assert recording.keys == [0, 1, 2, 3, 4]
    assert recording.num_cleared == 1
    recording.close()


def test_an_incomplete_replay_clears_the_cache(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.send(9, block(9))
    recording.until(lambda: recording.subscriber.is_behind)
    worker.reply(worker.next_request()[0], [(7, [block(7)]), (8, [block(8)])])
    recording.until(lambda: 9 in recording.keys)
    assert recording.keys == [7, 8, 9]
    recording.close()


def test_empty_replays_are_given_up(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.send(9, block(9))
    for _ in range(3):
        recording.until(lambda: worker.replay.poll(0) != 0)
        worker.reply(worker.next_request()[0], [])
    recording.until(lambda: recording.keys == [9])
    worker.send(10, block(10))
    recording.until(lambda: recording.keys == [9, 10])
    recording.close()


def test_a_replay_without_reply_times_out(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.send(9, block(9))
    recording.until(lambda: recording.subscriber.is_behind)
    recording.clock.advance(REPLAY_SECONDS + 0.1)
    recording.until(lambda: recording.keys == [9])
    recording.close()


def after_timeout(worker: FakeWorker) -> RecordingSubscriber:
    """A subscriber whose replay timed out, and that then received block 9."""
    recording = after_first_batch(worker)
    worker.send(9, block(9))
    recording.until(lambda: recording.subscriber.is_behind)
    recording.clock.advance(REPLAY_SECONDS + 0.1)
    recording.until(lambda: recording.keys == [9])
    worker.next_request()  # the worker reads the request too late
    return recording


def test_after_a_timeout_the_whole_cache_is_requested_later(worker: FakeWorker) -> None:
    recording = after_timeout(worker)
    recording.clock.advance(RETRY_SECONDS)
    recording.until(lambda: recording.subscriber.is_behind)
    assert recording.keys == [9]  # the known blocks stay until the reply arrives
    client, start = worker.next_request()
    assert start == 0
    worker.send(10, block(10))
    worker.reply(client, [(9, [CacheCleared(), *map(block, range(10))])])
    recording.until(lambda: recording.keys == list(range(11)))
    recording.clock.advance(2 * RETRY_SECONDS)
    worker.send(11, block(11))
    recording.until(lambda: recording.keys == list(range(12)))
    assert not recording.subscriber.is_behind
    recording.close()


@pytest.mark.parametrize("replies", [True, False])
def test_a_second_timeout_loses_no_blocks(worker: FakeWorker, replies: bool) -> None:
    recording = after_timeout(worker)
    for i in range(10, 13):
        recording.clock.advance(RETRY_SECONDS)
        recording.until(lambda: recording.subscriber.is_behind)
        worker.send(i, block(i))
        client, _ = worker.next_request()
        if replies:
            worker.reply(client, [])
        else:
            recording.clock.advance(REPLAY_SECONDS + 0.1)
        recording.until(lambda i=i: recording.keys == list(range(9, i + 1)))  # type: ignore[misc]
    recording.close()


def test_requests_to_an_unreachable_worker_do_not_pile_up(worker: FakeWorker) -> None:
    recording = RecordingSubscriber(worker.address, "tcp://127.0.0.1:1")
    worker.wait_subscribed()
    for i in range(20):
        recording.clock.advance(RETRY_SECONDS + REPLAY_SECONDS)
        recording.subscriber.receive()
        worker.send(i, block(i))
        recording.clock.advance(REPLAY_SECONDS + 0.1)
        recording.until(lambda i=i: i in recording.keys)  # type: ignore[misc]
    assert recording.subscriber._replay is not None
    with pytest.raises(zmq.Again):
        recording.subscriber._replay.send(b"", zmq.DONTWAIT)
    recording.close()


def test_a_restart_during_a_full_replay(worker: FakeWorker) -> None:
    recording = after_timeout(worker)
    recording.clock.advance(RETRY_SECONDS)
    recording.until(lambda: recording.subscriber.is_behind)
    late, _ = worker.next_request()
    worker.topic = b"second run"
    worker.send(0, block(20))
    recording.until(lambda: recording.keys == [])
    worker.reply(late, [(0, [block(20)])])
    worker.reply(worker.next_request()[0], [(0, [block(20)])])
    worker.send(1, block(21))
    recording.until(lambda: recording.keys == [20, 21])
    recording.close()


def test_without_a_replay_socket_a_gap_clears_the_cache(worker: FakeWorker) -> None:
    recording = RecordingSubscriber(worker.address, None)
    worker.wait_subscribed()
    worker.send(5, block(5))
    worker.send(6, block(6))
    recording.until(lambda: recording.keys == [5, 6])
    worker.send(8, block(8))
    recording.until(lambda: recording.keys == [8])
    recording.close()


@pytest.mark.parametrize(("topic", "number"), [(b"", 0), (b"second run", 2)])
def test_a_restart_is_replayed_from_0(worker: FakeWorker, topic: bytes, number: int) -> None:
    """A restart shows in numbers that start again, or in another topic."""
    recording = after_first_batch(worker)
    worker.send(1, block(1))
    recording.until(lambda: recording.keys == [0, 1])
    worker.topic = topic
    worker.send(number, block(20))
    recording.until(lambda: recording.keys == [])
    client, start = worker.next_request()
    assert start == 0
    worker.reply(client, [(i, [block(20 + i)]) for i in range(number + 1)])
    recording.until(lambda: len(recording.keys) == number + 1)
    worker.send(number + 1, block(30))
    recording.until(lambda: recording.keys[-1] == 30)
    assert recording.num_cleared == 2
    recording.close()


def test_an_invalid_batch_clears_the_cache_and_is_skipped(worker: FakeWorker) -> None:
    recording = after_first_batch(worker)
    worker.pub.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
    worker.pub.send_multipart([b"", b"short"])
    worker.send(2, block(2))
    recording.until(lambda: recording.keys == [2])
    recording.close()
