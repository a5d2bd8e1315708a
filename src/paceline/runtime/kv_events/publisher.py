"""Tells whoever listens what is in a worker's cache: numbered batches by ZeroMQ PUB, and a socket to ask for missed ones."""

import threading
from collections import deque
from contextlib import suppress

import zmq

from paceline.core.errors import InvalidConfig
from paceline.core.kv_events import CacheCleared, CacheEvent
from paceline.runtime.kv_events.catalog import KvCatalog
from paceline.runtime.kv_events.events import encode
from paceline.runtime.wire.curve import Authenticator, encrypt_server
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.transport import AddressInUse, is_local

GATHER_MS = 10
"""Events of so long go out as one batch."""
IDLE_TURNS = 100
"""Turns without an event after which an empty batch is sent: whoever missed the last one notices by its number."""
KEPT_BATCHES = 10_000
KEPT_BYTES = 16 << 20
QUEUE_BATCHES = 10_000
END = (-1).to_bytes(8, "big", signed=True)


class KvPublisher:
    """Frames: topic, number (8 bytes, big-endian), batch. To an empty frame and a number on the other socket it answers with
    every batch since, each as an empty frame, topic, number and batch, then number -1. What is older than it remembers is
    answered by one batch that tells the whole cache, under the number of the last one.

    The topic is new at every start, so that numbers of another life are not taken for this one's.
    """

    def __init__(self, address: str, topic: str, security: Security | None = None) -> None:
        """`address`: tcp://host:port for both sockets, port 0 for free ones."""
        if security is None and not is_local(address):
            raise InvalidConfig(f"{address} can be reached from other machines: give keys, or use 127.0.0.1")
        self._topic = topic.encode()
        self._events: deque[CacheEvent] = deque([CacheCleared()])
        self._catalog = KvCatalog()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._over = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None
        if security is not None:
            self._authenticator = Authenticator(self._context, security.allowed)
        self._pub = self._socket(zmq.PUB, security)
        self._replay = self._socket(zmq.ROUTER, security)
        try:
            self.address, self.replay_address = (_bind(socket, address) for socket in (self._pub, self._replay))
        except zmq.ZMQError as error:
            self._hang_up()
            raise AddressInUse(f"cannot publish on {address}: {error}; choose another port") from None
        self._thread = threading.Thread(target=self._run, name="paceline-kv-events", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def replay_port(self) -> int:
        return int(self.replay_address.rpartition(":")[2])

    def put(self, event: CacheEvent) -> None:
        """From the engine's thread; never waits."""
        self._events.append(event)

    def close(self) -> None:
        """What was put before is still sent. Safe to call twice."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        idle = 0
        while not self._over.is_set():
            if self._replay.poll(GATHER_MS):
                self._answer()
            idle = 0 if self._events else idle + 1
            if self._events or idle >= IDLE_TURNS:
                self._send()
                idle = 0
        if self._events:
            self._send()
        self._hang_up()

    def _send(self) -> None:
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            self._catalog.apply(event)
        batch = encode(events)
        self._pub.send_multipart([self._topic, _number(self._next), batch])
        self._kept.append((self._next, batch))
        self._kept_bytes += len(batch)
        self._next += 1
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        oldest = self._kept[0][0] if self._kept else self._next
        if start >= oldest:
            batches = [(number, batch) for number, batch in self._kept if number >= start]
        else:
            batches = [(self._next - 1, encode(self._catalog.events()))]
        with suppress(zmq.Again):  # who does not read what it asked for will ask again
            for number, batch in batches:
                self._replay.send_multipart([peer, b"", self._topic, _number(number), batch], zmq.DONTWAIT)
            self._replay.send_multipart([peer, b"", b"", END, b""], zmq.DONTWAIT)

    def _socket(self, kind: int, security: Security | None) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, QUEUE_BATCHES)
        socket.setsockopt(zmq.LINGER, 200)
        if security is not None:
            encrypt_server(socket, security.own)
        return socket

    def _hang_up(self) -> None:
        self._pub.close()
        self._replay.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()


def _bind(socket: "zmq.Socket[bytes]", address: str) -> str:
    socket.bind(address)
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _number(number: int) -> bytes:
    return number.to_bytes(8, "big")
