"""The event side of a vLLM server: its schema, its two encodings, its two sockets."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq

Encoding = Literal["maps", "arrays"]
END = (-1).to_bytes(8, "big", signed=True)


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """Format since 0.24. Fields without a default are always on the wire, and decoders require them."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class TypedBatch(Batch, array_like=True, omit_defaults=True):
    """The batch as vLLM's own tools decode it."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class StoredArray(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockStored"):
    """Format of 0.17 to 0.23. Earlier versions ended with `lora_id`, then with `medium`."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class RemovedArray(msgspec.Struct, array_like=True, omit_defaults=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class ClearedArray(msgspec.Struct, array_like=True, omit_defaults=True, tag="AllBlocksCleared"):
    pass


def key(ids: Sequence[int], salt: str = "") -> int:
    return hash((tuple(ids), salt)) & (1 << 64) - 1


class VllmServer:
    """Publishes on its own sockets. Single-threaded: `reply` serves replay requests."""

    def __init__(self, encoding: Encoding, max_kept: int = 10_000) -> None:
        self.encoding = encoding
        self._topic = b"kv-events"
        self._number = 0
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=max_kept)
        self.address = self.replay_address = "tcp://127.0.0.1:0"
        self._bind()

    def store(self, ids: Sequence[int], salt: str = "", start: int = 0, is_sent: bool = True, size: int = 16) -> None:
        """The blocks of `ids` from token `start` on."""
        hashes = [key(ids[:end], salt) for end in range(start + size, len(ids) + 1, size)]
        parent = key(ids[:start], salt) if start else None
        tokens = list(ids[start : start + size * len(hashes)])
        extra = [(salt,) if salt and not start and not i else None for i in range(len(hashes))]
        if self.encoding == "arrays":
            event: Any = StoredArray(hashes, parent, tokens, size, None, "GPU", None, extra)
        else:
            event = BlockStored(hashes, parent, tokens, size, None, "GPU", None, extra, 0, "full_attention")
        self._publish(event, is_sent)

    def remove(self, *prefixes: Sequence[int], is_sent: bool = True) -> None:
        hashes = [key(prefix) for prefix in prefixes]
        is_array = self.encoding == "arrays"
        self._publish(RemovedArray(hashes, "GPU") if is_array else BlockRemoved(hashes, "GPU", 0), is_sent)

    def clear(self) -> None:
        self._publish(ClearedArray() if self.encoding == "arrays" else AllBlocksCleared(), True)

    def reply(self) -> None:
        while self._replay.poll(0):
            client, _, start = self._replay.recv_multipart()
            topic = [] if self.encoding == "arrays" else [self._topic]
            for number, batch in self._buffer:
                if number >= int.from_bytes(start, "big"):
                    self._replay.send_multipart([client, b"", *topic, number.to_bytes(8, "big"), batch])
            self._replay.send_multipart([client, b"", *(b"" for _ in topic), END, b""])

    def restart(self) -> None:
        """Restart as another process at the same addresses: an empty cache, numbers from 0."""
        self.close()
        self._number = 0
        self._buffer.clear()
        self._bind()

    def wait_subscribed(self) -> None:
        assert self.pub.poll(10_000), "no subscription arrived"
        self.pub.recv()

    def close(self) -> None:
        self.pub.close()
        self._replay.close()
        self._context.term()

    def _bind(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.pub, self._replay = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        self.pub.linger = self._replay.linger = 0
        self.pub.bind(self.address)
        self._replay.bind(self.replay_address)
        self.address = self.pub.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.replay_address = self._replay.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def _publish(self, event: Any, is_sent: bool) -> None:
        batch = msgspec.msgpack.encode(Batch(1.0 + self._number, [event], 0))
        self._buffer.append((self._number, batch))
        if is_sent:
            self.pub.send_multipart([self._topic, self._number.to_bytes(8, "big"), batch])
        self._number += 1
