"""The client side of transfers in a worker."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.kernels.cpu.checksums import copy_crc32
from paceline.transfer.pool import ChannelPool
from paceline.transfer.transfer import (
    MAX_INFLIGHT_CHUNKS,
    Channel,
    ReceivedChunk,
    TransferCancelled,
    TransferFailed,
    chunk_range,
    num_chunks,
)
from paceline.wire.keys import Security
from paceline.wire.transfer_messages import TransferHandle

SILENCE_SECONDS = 10.0
"""Longest silence of a live server: it sends a keep-alive every second to clients that wait."""
CANCEL_POLL_SECONDS = 0.02
"""Interval at which a waiting fetch checks for cancellation."""


class TransferClient:
    """Fetches parts of transfers, on the caller's thread. Any number of threads may use it."""

    def __init__(self, security: Security | None, channels: Sequence[str] | None = None) -> None:
        """`security.own` authenticates this client; the handle has the server's key. With `security`, handles without a key are
        refused. Without it, handles with a key are refused. `channels` lists the channels that may be used. If it is None,
        `pick_channels` chooses them.
        """
        self._channels = ChannelPool(security, channels)

    def fetch(
        self,
        handle: TransferHandle,
        indices: Sequence[int],
        get_buffer: Callable[[int], memoryview],
        on_part: Callable[[int], None],
        cancelled: threading.Event | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Fetch the parts `indices`, requested in this order. Returns when all have arrived and their checksums match.

        `get_buffer(index)` returns a writable buffer of the part's size; it is called once a part, before its first byte. The
        buffer's content is undefined until `on_part(index)`. The two functions are called on this thread, and an exception of
        either ends the fetch. Raises TransferFailed if the server is gone, silent or refuses, if a chunk is corrupt, or if
        parts are missing after `timeout` seconds; TransferCancelled soon after `cancelled` is set.
        """
        if len(set(indices)) < len(indices) or any(not 0 <= index < len(handle.sizes) for index in indices):
            raise ValueError(f"indices must be distinct parts of a transfer of {len(handle.sizes)}")
        channel = self._channels.acquire(handle)
        try:
            _Fetch(channel, handle, indices, get_buffer, on_part, cancelled, timeout).run()
        except BaseException:
            channel.close()  # replies to open requests may still arrive on it
            raise
        self._channels.release(handle, channel)

    @property
    def num_idle_channels(self) -> int:
        return len(self._channels)

    def close(self) -> None:
        """Close idle channels. Fetches in progress continue."""
        self._channels.close()


class _Fetch:
    """One call of `TransferClient.fetch` over one channel."""

    def __init__(
        self,
        channel: Channel,
        handle: TransferHandle,
        indices: Sequence[int],
        get_buffer: Callable[[int], memoryview],
        on_part: Callable[[int], None],
        cancelled: threading.Event | None,
        timeout: float,
    ) -> None:
        self._channel = channel
        self._handle = handle
        self._indices = indices
        self._get_buffer = get_buffer
        self._on_part = on_part
        self._cancelled = cancelled
        self._timeout = timeout
        self._inflight: set[tuple[int, int]] = set()
        """Requested chunks: (part, chunk)."""
        self._buffers: dict[int, memoryview] = {}
        self._missing = {index: num_chunks(handle.sizes[index]) for index in indices}
        """Number of chunks of each part that have not arrived."""

    def run(self) -> None:
        started = last_reply = time.monotonic()
        chunks = self._chunks()
        while self._missing:
            while len(self._inflight) < MAX_INFLIGHT_CHUNKS and (chunk := next(chunks, None)) is not None:
                self._inflight.add(chunk)
                self._channel.request(self._handle.id, *chunk, self._size(*chunk))
            if self._cancelled is not None and self._cancelled.is_set():
                raise TransferCancelled("the transfer was cancelled")
            if time.monotonic() - started >= self._timeout:
                raise TransferFailed(f"{len(self._missing)} parts had not arrived after {self._timeout:g} s")
            reply = self._channel.receive(CANCEL_POLL_SECONDS)
            if isinstance(reply, ReceivedChunk):
                self._store(reply)
            if reply is not None:
                last_reply = time.monotonic()  # after `_store`: its duration is not the server's silence
            elif time.monotonic() - last_reply >= SILENCE_SECONDS:
                raise TransferFailed(f"the server sent nothing for {SILENCE_SECONDS:g} s")

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for index in self._indices:
            for chunk in range(num_chunks(self._handle.sizes[index])):
                yield index, chunk

    def _size(self, index: int, chunk: int) -> int:
        start, end = chunk_range(self._handle.sizes[index], chunk)
        return end - start

    def _store(self, received: ReceivedChunk) -> None:
        index, chunk, data = received.index, received.chunk, received.data
        if (index, chunk) not in self._inflight:
            raise TransferFailed("the server sent a chunk that was not requested")
        self._inflight.remove((index, chunk))
        buffer = self._buffer(index)
        start, end = chunk_range(buffer.nbytes, chunk)
        if data.nbytes != end - start or copy_crc32(data, buffer[start:end]) != received.checksum:
            raise TransferFailed(f"part {index} is corrupt: its checksum does not match")
        self._missing[index] -= 1
        if not self._missing[index]:
            del self._missing[index], self._buffers[index]
            buffer.release()
            self._on_part(index)

    def _buffer(self, index: int) -> memoryview:
        buffer = self._buffers.get(index)
        if buffer is None:
            view, size = self._get_buffer(index), self._handle.sizes[index]
            if view.nbytes != size or view.readonly or not view.c_contiguous:
                raise ValueError(f"the buffer for part {index} is not {size} writable, contiguous bytes")
            buffer = self._buffers[index] = view.cast("B") if size else memoryview(bytearray())
        return buffer
