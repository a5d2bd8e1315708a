"""Publishes the events of a worker's cache: numbered batches over ZeroMQ PUB, and a second socket that replays missed ones."""

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import suppress

import zmq

from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier
from paceline.runtime.kv_events.events import encode
from paceline.runtime.wire.curve import Authenticator, encrypt_server
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.transport import AddressInUse, require_keys

COLLECT_MS = 10
"""Time over which events are collected into one batch."""
IDLE_POLLS = 100
"""Polls without an event before an empty batch is sent: its number shows subscribers that they missed a batch."""
MAX_KEPT_BATCHES = 10_000
MAX_KEPT_BYTES = 16 << 20
MAX_QUEUED_BATCHES = 10_000
END = (-1).to_bytes(8, "big", signed=True)


class CacheContents:
    """The blocks of a cache by its events. Returns events that rebuild the cache from an empty one."""

    def __init__(self) -> None:
        self._blocks: dict[Tier, dict[Hashable, BlocksStored]] = {tier: {} for tier in TIERS}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def apply(self, event: CacheEvent) -> None:
        match event:
            case BlocksStored():
                size, parent = event.block_size, event.parent
                for i, key in enumerate(event.keys):
                    tokens = event.tokens[i * size : (i + 1) * size]
                    block = BlocksStored((key,), parent, tokens, event.salt, event.tier, size)
                    self._blocks[event.tier].setdefault(key, block)
                    parent = key
            case BlocksRemoved():
                for key in event.keys:
                    self._blocks[event.tier].pop(key, None)
            case CacheCleared():
                for blocks in self._blocks.values():
                    blocks.clear()

    def events(self) -> Iterator[CacheEvent]:
        """`CacheCleared`, then every block after its parent. Blocks without a cached parent cannot be hit and are left out."""
        yield CacheCleared()
        visited: set[Hashable] = set()
        children: dict[Hashable | None, list[BlocksStored]] = {}
        for blocks in self._blocks.values():
            for block in blocks.values():
                children.setdefault(block.parent, []).append(block)
        pending = list(reversed(children.get(None, ())))
        while pending:  # depth first: consecutive blocks of a chain stay consecutive
            block = pending.pop()
            yield block
            if block.keys[0] not in visited:
                visited.add(block.keys[0])
                pending.extend(reversed(children.get(block.keys[0], ())))


class KvPublisher:
    """A batch has the frames topic, number (8 bytes, big-endian), batch.

    A replay request is an empty frame and a number. The reply is every batch from that number on, each as an empty frame,
    topic, number and batch, then number -1. If the number is older than the kept batches, the reply is one batch with the
    whole cache under the number of the last batch.

    The topic is new at every start, so that subscribers do not mix up batch numbers of two runs.
    """

    def __init__(self, address: str, topic: str, security: Security | None = None) -> None:
        """`address` is tcp://host:port for the two sockets. Port 0 selects free ports."""
        require_keys(address, security)
        self._topic = topic.encode()
        self._events: deque[CacheEvent] = deque([CacheCleared()])
        self._contents = CacheContents()
        self._kept: deque[tuple[int, bytes]] = deque()
        """Sent batches with their numbers, for replay."""
        self._kept_bytes = 0
        self._next = 0
        """Number of the next batch."""
        self._stop = threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = None
        if security is not None:
            self._authenticator = Authenticator(self._context, security.allowed)
        self._pub = self._socket(zmq.PUB, security)
        self._replay = self._socket(zmq.ROUTER, security)
        try:
            self.address, self.replay_address = (_bind(socket, address) for socket in (self._pub, self._replay))
        except zmq.ZMQError as error:
            self._close_sockets()
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
        """Queue an event, from the engine's thread. Never waits."""
        self._events.append(event)

    def close(self) -> None:
        """Send the queued events and stop. Safe to call twice."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        num_idle = 0
        while not self._stop.is_set():
            if self._replay.poll(COLLECT_MS):
                self._reply()
            num_idle = 0 if self._events else num_idle + 1
            if self._events or num_idle >= IDLE_POLLS:
                self._send()
                num_idle = 0
        if self._events:
            self._send()
        self._close_sockets()

    def _send(self) -> None:
        events = [self._events.popleft() for _ in range(len(self._events))]
        for event in events:
            self._contents.apply(event)
        batch = encode(events)
        self._pub.send_multipart([self._topic, _number(self._next), batch])
        self._kept.append((self._next, batch))
        self._kept_bytes += len(batch)
        self._next += 1
        while len(self._kept) > MAX_KEPT_BATCHES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _reply(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        peer, start = frames[0], int.from_bytes(frames[2], "big")
        oldest = self._kept[0][0] if self._kept else self._next
        if start >= oldest:
            batches = [(number, batch) for number, batch in self._kept if number >= start]
        else:
            batches = [(self._next - 1, encode(self._contents.events()))]
        with suppress(zmq.Again):  # a subscriber that does not read its reply will ask again
            for number, batch in batches:
                self._replay.send_multipart([peer, b"", self._topic, _number(number), batch], zmq.DONTWAIT)
            self._replay.send_multipart([peer, b"", b"", END, b""], zmq.DONTWAIT)

    def _socket(self, kind: int, security: Security | None) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_BATCHES)
        socket.setsockopt(zmq.LINGER, 200)
        if security is not None:
            encrypt_server(socket, security.own)
        return socket

    def _close_sockets(self) -> None:
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
