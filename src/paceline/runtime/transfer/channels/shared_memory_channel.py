"""Shared memory on one machine, the client side."""

import fcntl
import mmap
import os
import select
import socket

from paceline.runtime.transfer.channels.channel import ReceivedChunk, decode_reply, require_keep_alive
from paceline.runtime.transfer.channels.shared_memory import (
    HELLO,
    MAX_MESSAGE_BYTES,
    SEALS,
    SEGMENT_BYTES,
    is_same_user,
    socket_path,
)
from paceline.runtime.transfer.messages import TO_SERVER, ChunkReply, ChunkRequest, KeepAlive
from paceline.runtime.transfer.transfer import CHUNK_BYTES, MAX_INFLIGHT_CHUNKS, ChannelUnavailable, TransferFailed

CONNECT_SECONDS = 2.0


class SharedMemoryChannel:
    """The server writes chunks into slots of this client's segment."""

    def __init__(self, address: str) -> None:
        """Raises ChannelUnavailable if the server is not on this machine."""
        self._free_slots = list(range(MAX_INFLIGHT_CHUNKS))
        self._inflight: dict[tuple[int, int], tuple[int, int]] = {}
        """(slot, size) by (part, chunk)."""
        self._slot_in_use: int | None = None
        """Slot of the last received chunk, which the caller may still read."""
        descriptor = os.memfd_create("paceline-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, SEGMENT_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._connection = _connect(address, descriptor)
            self._segment = memoryview(mmap.mmap(descriptor, SEGMENT_BYTES))
        finally:
            os.close(descriptor)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def request(self, id: bytes, index: int, chunk: int, size: int) -> None:
        self._free_last_slot()
        slot = self._free_slots.pop()
        self._inflight[index, chunk] = slot, size
        try:
            self._connection.send(TO_SERVER.encode(ChunkRequest(id, index, chunk, slot)))
        except OSError:
            raise TransferFailed("the server is gone") from None

    def receive(self, seconds: float) -> ReceivedChunk | KeepAlive | None:
        self._free_last_slot()
        if not self._poll.poll(seconds * 1e3):
            return None
        try:
            data = self._connection.recv(MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise TransferFailed("the server is gone")
        reply = decode_reply("the server", memoryview(data))
        if not isinstance(reply, ChunkReply):
            return require_keep_alive(reply)
        requested = self._inflight.pop((reply.index, reply.chunk), None)
        if requested is None:
            raise TransferFailed("the server sent a chunk that was not requested")
        slot, size = requested
        self._slot_in_use = slot
        start = slot * CHUNK_BYTES
        return ReceivedChunk(reply.index, reply.chunk, reply.checksum, self._segment[start : start + size])

    def is_broken(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """The server may write to the segment until it notices. Nothing reads the segment any more."""
        self._connection.close()

    def _free_last_slot(self) -> None:
        if self._slot_in_use is not None:
            self._free_slots.append(self._slot_in_use)
            self._slot_in_use = None


def _connect(address: str, segment: int) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(socket_path(address))
        if not is_same_user(connection):
            raise ChannelUnavailable("the server runs as another user")
        socket.send_fds(connection, [HELLO], [segment])
        if connection.recv(len(HELLO)) != HELLO:
            raise ChannelUnavailable("the server accepts no more shared memory clients")
    except OSError as error:
        connection.close()
        raise ChannelUnavailable(f"there is no such server on this machine: {error}") from None
    except ChannelUnavailable:
        connection.close()
        raise
    return connection
