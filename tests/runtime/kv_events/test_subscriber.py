"""Publisher and subscriber over loopback, and a subscriber against a socket that is played by hand."""

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.runtime.kv_events import publisher as kv_publisher
from paceline.runtime.kv_events.events import encode
from paceline.runtime.kv_events.publisher import END, KvPublisher
from paceline.runtime.kv_events.subscriber import REPLAY_SECONDS, RETRY_SECONDS, KvSubscriber
from paceline.runtime.wire.keys import Security, generate_key_pair

LOCAL = "tcp://127.0.0.1:0"


def block(i: int) -> BlocksStored:
    return BlocksStored([i], i - 1 if i else None, [i] * 16)


class Follower:
    """A subscriber, and the cache as it understands it: keys by arrival."""

    def __init__(self, address: str, replay: str | None, security: Security | None = None) -> None:
        self.clock = VirtualClock()
        self.keys: list[object] = []
        self.clearings = 0
        self.subscriber = KvSubscriber(address, replay, self.hear, self.clock, security)

    def hear(self, event: CacheEvent) -> None:
        match event:
            case CacheCleared():
                self.keys.clear()
                self.clearings += 1
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
            assert time.monotonic() < deadline, f"it has {self.keys}"
            poller.poll(20)
            self.subscriber.receive()

    def close(self) -> None:
        self.subscriber.close()


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    publisher = KvPublisher(LOCAL, "w@1")
    yield publisher
    publisher.close()


def follow(publisher: KvPublisher) -> Follower:
    return Follower(publisher.address, publisher.replay_address)


def test_events_arrive_in_order(publisher: KvPublisher) -> None:
    follower = follow(publisher)
    for i in range(100):
        publisher.put(block(i))
    publisher.put(BlocksRemoved([99]))
    follower.until(lambda: len(follower.keys) == 99)
    assert follower.keys == list(range(99))
    publisher.put(block(99))
    follower.until(lambda: len(follower.keys) == 100)
    follower.close()


def test_who_comes_late_is_told_what_was_before(publisher: KvPublisher) -> None:
    first = follow(publisher)
    publisher.put(block(0))
    publisher.put(block(1))
    first.until(lambda: len(first.keys) == 2)
    second = follow(publisher)
    second.until(lambda: len(second.keys) == 2 and not second.subscriber.is_behind)
    publisher.put(block(2))
    for follower in (first, second):
        follower.until(lambda follower=follower: follower.keys == [0, 1, 2])  # type: ignore[misc]
        follower.close()


def test_who_comes_after_what_is_remembered_is_told_the_whole_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "KEPT_BATCHES", 1)
    publisher = KvPublisher(LOCAL, "w@1")
    first = follow(publisher)
    for i in range(5):
        publisher.put(block(i))
        first.until(lambda i=i: len(first.keys) == i + 1)  # type: ignore[misc]
    publisher.put(BlocksRemoved([4]))
    first.until(lambda: len(first.keys) == 4)
    second = follow(publisher)
    second.until(lambda: second.keys == [0, 1, 2, 3] and not second.subscriber.is_behind)
    publisher.put(block(4))
    second.until(lambda: second.keys == [0, 1, 2, 3, 4])
    for each in (first, second, publisher):
        each.close()


def test_a_restarted_worker_at_the_same_address_begins_anew() -> None:
    before = KvPublisher(LOCAL, "w@1")
    follower = follow(before)
    for i in range(3):
        before.put(block(i))
    follower.until(lambda: len(follower.keys) == 3)
    before.close()
    # A publisher chooses its ports, so the second life is played by hand
    peer = Peer(before.address, before.replay_address)
    follower.until(lambda: peer.pub.poll(0) != 0)  # its subscription is renewed when it next looks
    peer.send(0, CacheCleared())
    follower.until(lambda: not follower.keys)
    who, start = peer.asked()
    assert start == 0
    peer.answer(who, [(0, [CacheCleared()]), (1, [block(7)])])
    follower.until(lambda: follower.keys == [7])
    follower.close()
    peer.close()


def test_a_new_life_is_noticed_by_who_was_only_told_of_the_old_one() -> None:
    peer = Peer(topic=b"w@1")
    follower = Follower(peer.address, peer.replay_address)
    peer.wait_subscribed()
    peer.answer(peer.asked()[0], [(0, [CacheCleared()]), (1, [block(0)])])
    follower.until(lambda: follower.keys == [0] and not follower.subscriber.is_behind)
    peer.topic = b"w@2"
    peer.send(0, CacheCleared())
    follower.until(lambda: not follower.keys)
    assert peer.asked()[1] == 0
    follower.close()
    peer.close()


def test_only_those_on_the_list_get_in() -> None:
    server, friend, stranger = generate_key_pair(), generate_key_pair(), generate_key_pair()
    publisher = KvPublisher(LOCAL, "w@1", Security(server, allowed=frozenset({friend.public})))
    addresses = publisher.address, publisher.replay_address
    publisher.put(block(0))
    inside = Follower(*addresses, Security(friend, server.public))
    inside.until(lambda: inside.keys == [0])
    outside = Follower(*addresses, Security(stranger, server.public))
    publisher.put(block(1))
    inside.until(lambda: inside.keys == [0, 1])
    assert not any(socket.poll(300) for socket in outside.subscriber.sockets)
    for each in (inside, outside, publisher):
        each.close()


def test_other_machines_need_keys() -> None:
    with pytest.raises(InvalidConfig, match="keys"):
        KvPublisher("tcp://0.0.0.0:0", "w@1")


def test_closing_twice_is_no_error(publisher: KvPublisher) -> None:
    publisher.close()
    publisher.close()


class Peer:
    """A worker played by hand: PUB, and ROUTER for questions."""

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

    def asked(self) -> tuple[bytes, int]:
        """Who asks, and from which number on."""
        assert self.replay.poll(10_000), "nobody asks"
        peer, empty, number = self.replay.recv_multipart()
        assert empty == b""
        return peer, int.from_bytes(number, "big")

    def answer(self, peer: bytes, batches: list[tuple[int, list[CacheEvent]]]) -> None:
        topic = [self.topic] if self.topic else []  # vLLM before 0.26 leaves it out
        for number, events in batches:
            self.replay.send_multipart([peer, b"", *topic, number.to_bytes(8, "big"), encode(events)])
        self.replay.send_multipart([peer, b"", END, b""])

    def close(self) -> None:
        self.pub.close()
        self.replay.close()
        self._context.term()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def started(peer: Peer) -> Follower:
    """A follower that has batch 0, with block 0."""
    follower = Follower(peer.address, peer.replay_address)
    peer.wait_subscribed()
    who, start = peer.asked()
    assert start == 0
    peer.answer(who, [(0, [block(0)])])
    follower.until(lambda: follower.keys == [0] and not follower.subscriber.is_behind)
    return follower


def test_a_gap_is_asked_for(peer: Peer) -> None:
    follower = started(peer)
    peer.send(3, block(3))
    follower.until(lambda: follower.subscriber.is_behind)
    peer.send(4, block(4))
    who, start = peer.asked()
    assert start == 1
    peer.answer(who, [(1, [block(1)]), (2, [block(2)]), (3, [block(3)])])
    follower.until(lambda: len(follower.keys) == 5)
    assert follower.keys == [0, 1, 2, 3, 4]
    assert follower.clearings == 1
    follower.close()


def test_what_was_answered_and_comes_again_is_dropped(peer: Peer) -> None:
    follower = started(peer)
    peer.send(2, block(2))
    follower.until(lambda: follower.subscriber.is_behind)
    peer.answer(peer.asked()[0], [(i, [block(i)]) for i in (1, 2, 3)])
    follower.until(lambda: len(follower.keys) == 4)
    peer.send(3, block(3))
    peer.send(4, block(4))
    follower.until(lambda: len(follower.keys) == 5)
    assert follower.keys == [0, 1, 2, 3, 4]
    assert follower.clearings == 1
    follower.close()


def test_history_that_is_gone_clears(peer: Peer) -> None:
    follower = started(peer)
    peer.send(9, block(9))
    follower.until(lambda: follower.subscriber.is_behind)
    peer.answer(peer.asked()[0], [(7, [block(7)]), (8, [block(8)])])
    follower.until(lambda: 9 in follower.keys)
    assert follower.keys == [7, 8, 9]
    follower.close()


def test_answers_that_never_help_are_given_up(peer: Peer) -> None:
    follower = started(peer)
    peer.send(9, block(9))
    for _ in range(3):
        follower.until(lambda: peer.replay.poll(0) != 0)
        peer.answer(peer.asked()[0], [])
    follower.until(lambda: follower.keys == [9])
    peer.send(10, block(10))
    follower.until(lambda: follower.keys == [9, 10])
    follower.close()


def test_no_answer_is_given_up_in_time(peer: Peer) -> None:
    follower = started(peer)
    peer.send(9, block(9))
    follower.until(lambda: follower.subscriber.is_behind)
    follower.clock.advance(REPLAY_SECONDS + 0.1)
    follower.until(lambda: follower.keys == [9])
    follower.close()


def given_up(peer: Peer) -> Follower:
    """A follower of a peer that was too busy to answer, and has since said that it has block 9."""
    follower = started(peer)
    peer.send(9, block(9))
    follower.until(lambda: follower.subscriber.is_behind)
    follower.clock.advance(REPLAY_SECONDS + 0.1)
    follower.until(lambda: follower.keys == [9])
    peer.asked()  # it reads the question, too late
    return follower


def test_who_was_too_busy_to_answer_is_asked_again_for_everything(peer: Peer) -> None:
    follower = given_up(peer)
    follower.clock.advance(RETRY_SECONDS)
    follower.until(lambda: follower.subscriber.is_behind)
    assert follower.keys == [9]  # what is known stays until there is better
    who, start = peer.asked()
    assert start == 0
    peer.send(10, block(10))
    peer.answer(who, [(9, [CacheCleared(), *map(block, range(10))])])
    follower.until(lambda: follower.keys == list(range(11)))
    follower.clock.advance(2 * RETRY_SECONDS)
    peer.send(11, block(11))
    follower.until(lambda: follower.keys == list(range(12)))
    assert not follower.subscriber.is_behind
    follower.close()


@pytest.mark.parametrize("answers", [True, False])
def test_who_has_no_answer_the_second_time_either_costs_nothing(peer: Peer, answers: bool) -> None:
    follower = given_up(peer)
    for i in range(10, 13):
        follower.clock.advance(RETRY_SECONDS)
        follower.until(lambda: follower.subscriber.is_behind)
        peer.send(i, block(i))
        who, _ = peer.asked()
        if answers:
            peer.answer(who, [])
        else:
            follower.clock.advance(REPLAY_SECONDS + 0.1)
        follower.until(lambda i=i: follower.keys == list(range(9, i + 1)))  # type: ignore[misc]
    follower.close()


def test_questions_to_nobody_do_not_pile_up(peer: Peer) -> None:
    follower = Follower(peer.address, "tcp://127.0.0.1:1")
    peer.wait_subscribed()
    for i in range(20):
        follower.clock.advance(RETRY_SECONDS + REPLAY_SECONDS)
        follower.subscriber.receive()
        peer.send(i, block(i))
        follower.clock.advance(REPLAY_SECONDS + 0.1)
        follower.until(lambda i=i: i in follower.keys)  # type: ignore[misc]
    assert follower.subscriber._replay is not None
    with pytest.raises(zmq.Again):
        follower.subscriber._replay.send(b"", zmq.DONTWAIT)
    follower.close()


def test_a_new_life_while_everything_is_asked_for_again(peer: Peer) -> None:
    follower = given_up(peer)
    follower.clock.advance(RETRY_SECONDS)
    follower.until(lambda: follower.subscriber.is_behind)
    late, _ = peer.asked()
    peer.topic = b"another life"
    peer.send(0, block(20))
    follower.until(lambda: follower.keys == [])
    peer.answer(late, [(0, [block(20)])])
    peer.answer(peer.asked()[0], [(0, [block(20)])])
    peer.send(1, block(21))
    follower.until(lambda: follower.keys == [20, 21])
    follower.close()


def test_without_a_replay_socket_a_gap_clears(peer: Peer) -> None:
    follower = Follower(peer.address, None)
    peer.wait_subscribed()
    peer.send(5, block(5))
    peer.send(6, block(6))
    follower.until(lambda: follower.keys == [5, 6])
    peer.send(8, block(8))
    follower.until(lambda: follower.keys == [8])
    follower.close()


@pytest.mark.parametrize(("topic", "number"), [(b"", 0), (b"another life", 2)])
def test_a_new_life_is_told_from_its_beginning(peer: Peer, topic: bytes, number: int) -> None:
    """By numbers that begin again, or by another topic."""
    follower = started(peer)
    peer.send(1, block(1))
    follower.until(lambda: follower.keys == [0, 1])
    peer.topic = topic
    peer.send(number, block(20))
    follower.until(lambda: follower.keys == [])
    who, start = peer.asked()
    assert start == 0
    peer.answer(who, [(i, [block(20 + i)]) for i in range(number + 1)])
    follower.until(lambda: len(follower.keys) == number + 1)
    peer.send(number + 1, block(30))
    follower.until(lambda: follower.keys[-1] == 30)
    assert follower.clearings == 2
    follower.close()


def test_a_batch_that_cannot_be_read_clears_and_is_passed(peer: Peer) -> None:
    follower = started(peer)
    peer.pub.send_multipart([b"", (1).to_bytes(8, "big"), b"\xc1"])
    peer.pub.send_multipart([b"", b"short"])
    peer.send(2, block(2))
    follower.until(lambda: follower.keys == [2])
    follower.close()
