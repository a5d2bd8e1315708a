"""Connections to a draft worker without sockets and their threads: a message arrives at once, and time is virtual."""

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from paceline.core.clock import VirtualClock
from paceline.wire import link
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.draft_messages import TO_DRAFT_WORKER, TO_TARGET, FromDraft, FromTarget
from paceline.wire.keys import Security
from paceline.wire.transport import Connection, Listener, Peer, Received, TrafficCounters


class MemoryListener(Listener[FromTarget]):
    """The listener of a worker that runs on the thread of its targets: it does not wait."""

    address = "tcp://127.0.0.1:1"
    num_rejected = 0

    def __init__(self) -> None:
        self.traffic, self._codec = TrafficCounters(), TO_DRAFT_WORKER
        self.inboxes: dict[Peer, deque[bytes]] = {}
        """Messages that the connected peers have not received yet."""
        self.arrived: deque[tuple[Peer, bytes]] = deque()
        self.new_peers = map(b"%d".__mod__, itertools.count())

    def receive(self, seconds: float = 0.0) -> Received[FromTarget] | None:
        if not self.arrived:
            return None
        peer, data = self.arrived.popleft()
        return Received(peer, self._decode(data), len(data))

    def send(self, peer: Peer, message: Any) -> bool:
        if peer in self.inboxes:
            self.inboxes[peer].append(self._codec.encode(message))
            self.traffic.sent += 1
        return peer in self.inboxes

    def wake(self) -> None: ...

    def close(self) -> None: ...


class MemoryConnection(Connection[FromDraft]):
    """A target's connection to a `MemoryListener`. A wait without a message takes its time on the clock."""

    def __init__(self, listener: MemoryListener, clock: VirtualClock) -> None:
        self.traffic, self._codec = TrafficCounters(), TO_TARGET
        self._listener, self._clock, self._name = listener, clock, next(listener.new_peers)
        self._inbox = listener.inboxes[self._name] = deque()

    def wait(self, seconds: float) -> bool:
        if not self._inbox:
            self._clock.advance(max(0.0, seconds))
        return bool(self._inbox)

    def receive(self, seconds: float = 0.0) -> FromDraft | MalformedMessage | None:
        return self._decode(self._inbox.popleft()) if self.wait(seconds) else None

    def send(self, message: Any) -> bool:
        self.send_bytes(self._codec.encode(message))
        return True

    def send_bytes(self, data: bytes) -> None:
        self._listener.arrived.append((self._name, data))

    def was_disconnected(self) -> bool:
        return False

    def close(self) -> None:
        self._listener.inboxes.pop(self._name, None)


@contextmanager
def connections_in_memory(listener: MemoryListener, clock: VirtualClock) -> Iterator[None]:
    """Pools connect to `listener` in memory, and to other addresses with sockets."""

    def connect(address: str, codec: Codec[FromDraft], security: Security | None) -> Connection[FromDraft]:
        if address == listener.address:
            return MemoryConnection(listener, clock)
        return Connection(address, codec, security)

    with patch.object(link, "Connection", connect):
        yield
