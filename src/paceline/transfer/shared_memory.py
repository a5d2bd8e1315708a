"""Shared memory on one machine as a channel: `SharedMemoryListener` on the server, `SharedMemoryChannel` on the client.

A client creates an anonymous segment (memfd) and passes its descriptor over an abstract Unix socket. There is no name to clean
up: the kernel frees the segment when the two processes have closed it, however they ended. The segment must be sealed against
shrinking: a write beyond its end would kill the server with SIGBUS. Messages use the same socket. The kernel reports the
client's user; keys would add nothing, because a process of the same user can read them.
"""

import fcntl
import itertools
import mmap
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from paceline.transfer.transfer import (
    CHUNK_BYTES,
    MAX_INFLIGHT_CHUNKS,
    ChannelUnavailable,
    ReceivedChunk,
    TransferFailed,
    decode_reply,
    require_keep_alive,
)
from paceline.wire.transfer_messages import TO_SERVER, ChunkReply, ChunkRequest, KeepAlive

SEGMENT_BYTES = MAX_INFLIGHT_CHUNKS * CHUNK_BYTES
SEALS = 0 if sys.platform != "linux" else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HELLO = b"here"
MAX_MESSAGE_BYTES = 4096
MAX_CLIENTS = 256
_CREDENTIALS = struct.Struct("3i")


def is_available() -> bool:
    return sys.platform == "linux"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the peer process has this process's user. Every user of the machine can see the socket's name."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def socket_path(address: str) -> bytes:
    """The address in the abstract namespace of Unix sockets, which begins with a zero byte."""
    return b"\0" + address[1:].encode()


class _LocalClient:
    """A connected client and its segment, once that has arrived."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.segment: memoryview | None = None


class SharedMemoryListener:
    """Used by the server's thread only. Names of clients are never reused."""

    def __init__(self) -> None:
        self.address = f"@paceline-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._socket.bind(socket_path(self.address))
        self._socket.listen(64)
        self._poll = select.epoll()
        self._poll.register(self._socket, select.EPOLLIN)
        self._clients: dict[str, _LocalClient] = {}
        self._names: dict[int, str] = {}
        """Client names by descriptor of the connection."""
        self._numbers = itertools.count()

    @property
    def descriptor(self) -> int:
        """Descriptor that is readable when `receive` has work."""
        return self._poll.fileno()

    def receive(self) -> Iterator[tuple[str, bytes | None]]:
        """Accept clients and yield some messages of each: (client, message), with None when it has disconnected."""
        for number, _ in self._poll.poll(0):
            if number == self._socket.fileno():
                self._accept()
                continue
            name = self._names.get(number)
            if name is None:
                continue
            client = self._clients[name]
            if client.segment is None:
                client.segment = _receive_segment(client.connection)
                if client.segment is None:
                    self.disconnect(name)
                continue
            for _ in range(MAX_INFLIGHT_CHUNKS):
                try:
                    message = client.connection.recv(MAX_MESSAGE_BYTES)
                except BlockingIOError:
                    break
                except OSError:
                    message = b""
                if not message:
                    self.disconnect(name)
                yield name, message or None
                if name not in self._clients:
                    break

    def write(self, name: str, slot: int, data: memoryview) -> bool:
        """Copy `data` into a slot of the client's segment. False if there is no such slot."""
        client = self._clients.get(name)
        if client is None or client.segment is None or not 0 <= slot < MAX_INFLIGHT_CHUNKS:
            return False
        start = slot * CHUNK_BYTES
        # numpy releases the interpreter lock
        np.copyto(np.frombuffer(client.segment[start : start + data.nbytes], np.uint8), np.frombuffer(data, np.uint8))
        return True

    def send(self, name: str, message: bytes) -> bool:
        """False if the client is gone or does not read."""
        try:
            self._clients[name].connection.send(message)
        except (KeyError, OSError):
            return False
        return True

    def disconnect(self, name: str) -> None:
        """An unknown name is no error."""
        client = self._clients.pop(name, None)
        if client is not None:
            del self._names[client.connection.fileno()]
            self._poll.unregister(client.connection)
            client.connection.close()

    def close(self) -> None:
        for name in list(self._clients):
            self.disconnect(name)
        self._poll.close()
        self._socket.close()

    def _accept(self) -> None:
        with suppress(OSError):  # the client disconnected, or this process is out of descriptors
            connection, _ = self._socket.accept()
            if len(self._clients) >= MAX_CLIENTS or not is_same_user(connection):
                connection.close()
                return
            connection.setblocking(False)
            name = f"local client {next(self._numbers)}"
            self._names[connection.fileno()] = name
            self._clients[name] = _LocalClient(connection)
            self._poll.register(connection, select.EPOLLIN)


def _receive_segment(connection: socket.socket) -> memoryview | None:
    """Read a client's first message, `HELLO` and one descriptor, and map the segment. None if either is invalid."""
    descriptors: list[int] = []
    try:
        hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO) + 1, 1, socket.MSG_CMSG_CLOEXEC)
        if hello != HELLO or len(descriptors) != 1 or not _is_segment(descriptors[0]):
            return None
        segment = memoryview(mmap.mmap(descriptors[0], SEGMENT_BYTES))
        connection.send(HELLO)
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return segment


def _is_segment(descriptor: int) -> bool:
    """Whether it is memory of the right size, sealed. Only memfd files have seals."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & SEALS == SEALS and os.fstat(descriptor).st_size == SEGMENT_BYTES


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
