"""Shared memory inside one host, the giving side: windows that takers have handed over.

A window is a taker's anonymous memory (memfd), passed as a descriptor over a Unix socket of no file: there is no name to
clean up, and the kernel frees it when both ends have let go, however they ended. It must be sealed against shrinking: to write
where its owner has cut it short would end the giver with a SIGBUS. Messages go over the same socket, straight from thread to
thread. Who it is, the kernel says: keys would add nothing, since the same user can read them.
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

from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES, copy

WINDOW_BYTES = WINDOW_PIECES * PIECE_BYTES
SEALS = 0 if sys.platform != "linux" else fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
HERE = b"here"
MESSAGE_BYTES = 4096
MAX_WINDOWS = 256
_CREDENTIALS = struct.Struct("3i")


def is_available() -> bool:
    return sys.platform == "linux"


def is_same_user(line: socket.socket) -> bool:
    """The name of the socket can be seen by every user of the machine."""
    _, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


class Neighbour:
    """A taker on this machine: its line, and its window once that has come."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.window: memoryview | None = None


class Windows:
    """Belongs to the depot's thread. Takers are told apart by a name that is never used again."""

    def __init__(self) -> None:
        self.address = f"@paceline-{secrets.token_hex(16)}"
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._door.bind(path_of(self.address))
        self._door.listen(64)
        self._poll = select.epoll()
        self._poll.register(self._door, select.EPOLLIN)
        self._neighbours: dict[str, Neighbour] = {}
        self._names: dict[int, str] = {}
        """By the descriptor of the line."""
        self._numbers = itertools.count()

    @property
    def descriptor(self) -> int:
        """Readable when there is something to `attend` to."""
        return self._poll.fileno()

    def attend(self) -> Iterator[tuple[str, bytes | None]]:
        """What takers said since, a message of each; None: it left."""
        for number, _ in self._poll.poll(0):
            if number == self._door.fileno():
                self._let_in()
                continue
            name = self._names.get(number)
            if name is None:
                continue
            neighbour = self._neighbours[name]
            if neighbour.window is None:
                neighbour.window = _take_window(neighbour.line)
                if neighbour.window is None:
                    self.leave(name)
                continue
            try:
                message = neighbour.line.recv(MESSAGE_BYTES)
            except OSError:
                message = b""
            if not message:
                self.leave(name)
            yield name, message or None

    def place(self, name: str, slot: int, data: memoryview) -> bool:
        """Whether `data` is now in this slot of the taker's window. False: there is no such slot."""
        neighbour = self._neighbours.get(name)
        if neighbour is None or neighbour.window is None or not 0 <= slot < WINDOW_PIECES:
            return False
        start = slot * PIECE_BYTES
        copy(data, neighbour.window[start : start + data.nbytes])
        return True

    def send(self, name: str, message: bytes) -> bool:
        """False: it is gone, or does not read."""
        try:
            self._neighbours[name].line.send(message)
        except (KeyError, OSError):
            return False
        return True

    def leave(self, name: str) -> None:
        neighbour = self._neighbours.pop(name, None)
        if neighbour is not None:
            del self._names[neighbour.line.fileno()]
            self._poll.unregister(neighbour.line)
            neighbour.line.close()

    def close(self) -> None:
        for name in list(self._neighbours):
            self.leave(name)
        self._poll.close()
        self._door.close()

    def _let_in(self) -> None:
        with suppress(OSError):  # it left meanwhile, or there are no descriptors to be had
            line, _ = self._door.accept()
            if len(self._neighbours) >= MAX_WINDOWS or not is_same_user(line):
                line.close()
                return
            line.setblocking(False)
            name = f"window {next(self._numbers)}"
            self._names[line.fileno()] = name
            self._neighbours[name] = Neighbour(line)
            self._poll.register(line, select.EPOLLIN)


def path_of(address: str) -> bytes:
    """A name in the abstract space of Unix sockets, which begins with a zero byte."""
    return b"\0" + address[1:].encode()


def _take_window(line: socket.socket) -> memoryview | None:
    """The first message of a taker: nothing but the descriptor. None: it is not what it should be."""
    descriptors: list[int] = []
    try:
        hello, descriptors, _, _ = socket.recv_fds(line, len(HERE) + 1, 1, socket.MSG_CMSG_CLOEXEC)
        if hello != HERE or len(descriptors) != 1 or not _is_window(descriptors[0]):
            return None
        window = memoryview(mmap.mmap(descriptors[0], WINDOW_BYTES))
        line.send(HERE)
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return window


def _is_window(descriptor: int) -> bool:
    """Memory of the right size that will stay so; nothing else has seals."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return seals & SEALS == SEALS and os.fstat(descriptor).st_size == WINDOW_BYTES
