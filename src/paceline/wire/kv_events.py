"""Cache events in vLLM's wire format: vLLM servers can feed the index, and vLLM's tools can read Paceline workers.

A batch is a msgpack array: time, events, rank. An event is a map with its type in the field `type`; vLLM before 0.24 sends an
array of the type and the same fields in order. This module writes maps. It reads maps and arrays, and also batches that are
maps.

`KvPublisher` publishes the events of a worker's cache: numbered batches over ZeroMQ PUB, and a second socket that replays
missed ones.
"""

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import zmq

from paceline.core.kv_events import TIERS as TIER_NAMES
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier
from paceline.wire.codec import MalformedMessage
from paceline.wire.curve import Authenticator, encrypt_server
from paceline.wire.draft_messages import Token
from paceline.wire.keys import Security
from paceline.wire.transport import AddressInUse, require_keys

Hash = int | bytes
MEDIUMS: dict[Tier, str] = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
TIERS: dict[str | None, Tier] = {None: "device", "DISK": "disk", **{medium: tier for tier, medium in MEDIUMS.items()}}
FIRST_GROUP = (None, 0)
"""Block groups that are read. Models with several kinds of attention have a group for each; the first is enough."""


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block, what its hash covers in addition to tokens. The first block of a sequence has the salt."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    pass


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _BatchArray(EventBatch, array_like=True):
    pass


_ENCODER = msgspec.msgpack.Encoder()
_BATCH_MAP = msgspec.msgpack.Decoder(EventBatch)
_BATCH_ARRAY = msgspec.msgpack.Decoder(_BatchArray)
_EVENT_MAP = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
_EVENT_ARRAY = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)


def encode(events: Iterable[CacheEvent], now: float | None = None) -> bytes:
    """A batch. Consecutive blocks of a chain become one event."""
    wire = [msgspec.Raw(_ENCODER.encode(_to_wire(event))) for event in _join(events)]
    return _ENCODER.encode(_BatchArray(time.time() if now is None else now, wire, 0))


def decode(data: bytes) -> list[CacheEvent]:
    """The events of a batch that routing can use. Raises `MalformedMessage`."""
    try:
        batch: EventBatch = _BATCH_ARRAY.decode(data) if _is_array(data) else _BATCH_MAP.decode(data)
        decoded = [(_EVENT_ARRAY if _is_array(raw) else _EVENT_MAP).decode(raw) for raw in map(bytes, batch.events)]
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise MalformedMessage(str(error)[:200]) from None
    return [event for wire in decoded if (event := _from_wire(wire)) is not None]


def short_key(key: Any) -> Any:
    """The first eight bytes of a key as an integer. They identify a block of one worker, and halve the index."""
    return int.from_bytes(key[:8], "big") if isinstance(key, bytes) else key


def _join(events: Iterable[CacheEvent]) -> Iterator[CacheEvent]:
    """Join consecutive events: caches store and evict block by block."""
    run: list[Any] = []
    for event in events:
        if run and not _can_join(run[-1], event):
            yield _merge(run)
            run = []
        run.append(event)
    if run:
        yield _merge(run)


def _can_join(last: CacheEvent, event: CacheEvent) -> bool:
    match last, event:
        case BlocksStored(), BlocksStored():
            return event.parent == last.keys[-1] and event.tier == last.tier
        case BlocksRemoved(), BlocksRemoved():
            return event.tier == last.tier
        case _:
            return False


def _merge(run: list[Any]) -> CacheEvent:
    first: CacheEvent = run[0]
    match first:
        case BlocksStored():
            keys, tokens = [k for event in run for k in event.keys], [t for event in run for t in event.tokens]
            return replace(first, keys=keys, tokens=tokens)
        case BlocksRemoved():
            return replace(first, keys=[key for event in run for key in event.keys])
        case CacheCleared():
            return first


def _to_wire(event: CacheEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case BlocksStored():
            extra: list[list[Any] | None] | None = None
            if event.salt and event.parent is None:
                extra = [[event.salt], *[None] * (len(event.keys) - 1)]
            return BlockStored(
                block_hashes=[short_key(key) for key in event.keys],
                parent_block_hash=short_key(event.parent),
                token_ids=list(event.tokens),
                block_size=event.block_size,
                medium=MEDIUMS[event.tier],
                extra_keys=extra,
            )
        case BlocksRemoved():
            return BlockRemoved([short_key(key) for key in event.keys], MEDIUMS[event.tier])
        case CacheCleared():
            return AllBlocksCleared()


def _from_wire(event: BlockStored | BlockRemoved | AllBlocksCleared) -> CacheEvent | None:
    """None for blocks that no prompt can hit."""
    match event:
        case BlockStored():
            tier = TIERS.get(event.medium)
            salt = _salt(event)
            if tier is None or salt is None or not event.block_hashes or event.group_idx not in FIRST_GROUP:
                return None
            return BlocksStored(
                event.block_hashes, event.parent_block_hash, event.token_ids, salt, tier, event.block_size
            )
        case BlockRemoved():
            tier = TIERS.get(event.medium)
            return (
                None if tier is None or event.group_idx not in FIRST_GROUP else BlocksRemoved(event.block_hashes, tier)
            )
        case AllBlocksCleared():
            return CacheCleared()


def _salt(event: BlockStored) -> str | None:
    """The salt of the blocks. None if they depend on more than tokens and a salt, such as an adapter or an image."""
    extra: Sequence[list[Any] | None] = event.extra_keys or ()
    if event.lora_id is not None or event.lora_name is not None or any(extra[1:]):
        return None
    first = extra[0] if extra else None
    if not first:
        return ""
    is_salt = event.parent_block_hash is None and len(first) == 1 and isinstance(first[0], str)
    return first[0] if is_salt else None


def _is_array(data: bytes) -> bool:
    return bool(data) and (0x90 <= data[0] <= 0x9F or data[0] in (0xDC, 0xDD))


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
        self._blocks: dict[Tier, dict[Hashable, BlocksStored]] = {tier: {} for tier in TIER_NAMES}

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
