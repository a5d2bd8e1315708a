"""The data of one transfer: parts that become ready over time, sent in chunks with checksums.

`Channel` is the interface that every channel implements on the client side.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import PacelineError
from paceline.kernels.cpu.checksums import crc32
from paceline.wire.codec import MalformedMessage
from paceline.wire.transfer_messages import MAX_PART_BYTES, MAX_PARTS, TO_CLIENT, KeepAlive, Refused, Reply

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk. The number is part of the protocol, so server and client must agree."""
MAX_INFLIGHT_CHUNKS = 16
"""Chunks that one fetch has requested and not received. Bounds its memory."""


class TransferFailed(PacelineError):
    """The data did not arrive, or not intact. Compute it, or fetch it from another worker."""


class TransferCancelled(PacelineError):
    """The client cancelled the fetch."""


class ChannelUnavailable(PacelineError):
    """This channel does not reach that server. Try the next channel."""


def num_chunks(size: int) -> int:
    """Chunks of a part of `size` bytes. An empty part has one chunk, so that its arrival is reported."""
    return max(1, -(-size // CHUNK_BYTES))


def chunk_range(size: int, chunk: int) -> tuple[int, int]:
    """Start and end of `chunk` within a part of `size` bytes."""
    start = chunk * CHUNK_BYTES
    return start, min(size, start + CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Part:
    """One filled part."""

    data: memoryview
    checksums: tuple[int, ...]
    """Checksum of each chunk, computed when the part was filled."""


class Transfer:
    """Parts of known sizes. Any thread may fill them, in any order, each once.

    A part is kept by reference: its bytes must not change until the transfer is withdrawn. Changed bytes fail the checksum at
    the client.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if not 0 < len(sizes) <= MAX_PARTS or any(not 0 <= size <= MAX_PART_BYTES for size in sizes):
            raise ValueError(f"a transfer has 1 to {MAX_PARTS} parts of 0 to {MAX_PART_BYTES} bytes")
        self.sizes = tuple(sizes)
        self._abort_reason: str | None = None
        self._parts: dict[int, Part] = {}
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def fill(self, index: int, data: memoryview) -> None:
        """Set part `index` to `data`, which must be C-contiguous."""
        if not data.c_contiguous:
            raise ValueError(f"part {index} is not C-contiguous: copy it to a contiguous buffer first")
        flat = data.cast("B") if data.nbytes else memoryview(b"")
        size = self.sizes[index]
        if flat.nbytes != size:
            raise ValueError(f"part {index} was declared with {size} bytes and is filled with {flat.nbytes}")
        ranges = (chunk_range(size, chunk) for chunk in range(num_chunks(size)))
        part = Part(flat.toreadonly(), tuple(crc32(flat[start:end]) for start, end in ranges))
        with self._lock:
            if index in self._parts:
                raise ValueError(f"part {index} is filled already")
            self._parts[index] = part
        self._notify()

    def abort(self, reason: str) -> None:
        """Fail the parts that are not filled: clients that wait for one get `reason`. Filled parts can still be fetched."""
        with self._lock:
            self._abort_reason = self._abort_reason or reason
        self._notify()

    def part(self, index: int) -> Part | None:
        """Part `index`, or None while it is not ready. Raises TransferFailed after `abort`."""
        with self._lock:
            part = self._parts.get(index)
            if part is None and self._abort_reason is not None:
                raise TransferFailed(self._abort_reason)
            return part

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every `fill` and `abort`, on the thread of that call."""
        with self._lock:
            self._listeners.append(listener)

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def _notify(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    index: int
    chunk: int
    checksum: int
    data: memoryview
    """Bytes of the chunk, valid until the next call of the channel."""


class Channel(Protocol):
    """Used by one thread at a time. After a failed fetch the caller closes it."""

    def request(self, id: bytes, index: int, chunk: int, size: int) -> None:
        """Request a chunk of `size` bytes. At most `MAX_INFLIGHT_CHUNKS` requests may be open."""

    def receive(self, seconds: float) -> ReceivedChunk | KeepAlive | None:
        """The next reply, or None after `seconds`. Raises TransferFailed if the server refuses or is gone."""

    def is_broken(self) -> bool: ...

    def close(self) -> None: ...


def decode_reply(server: str, data: memoryview) -> Reply:
    """Raises TransferFailed for a refusal and for bytes that are no message; `server` names it in the error."""
    try:
        reply = TO_CLIENT.decode(data)
    except MalformedMessage as malformed:
        raise TransferFailed(f"{server} does not speak the transfer protocol: {malformed}") from None
    if isinstance(reply, Refused):
        raise TransferFailed(f"{server}: {reply.reason}")
    return reply


def require_keep_alive(reply: Reply) -> KeepAlive:
    """Raises TransferFailed for any other message."""
    if not isinstance(reply, KeepAlive):
        raise TransferFailed("the server sent a message that was not requested")
    return reply
