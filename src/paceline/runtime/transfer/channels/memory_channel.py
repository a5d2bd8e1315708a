"""Shared memory inside one host, the taking side."""

import fcntl
import mmap
import os
import select
import socket

from paceline.runtime.transfer.answers import decode_answer
from paceline.runtime.transfer.channels.channel import Landed, expect_patience
from paceline.runtime.transfer.channels.windows import HERE, MESSAGE_BYTES, SEALS, WINDOW_BYTES, is_same_user, path_of
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed
from paceline.runtime.transfer.messages import TO_DEPOT, Patience, Piece, Want
from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES

HELLO_SECONDS = 2.0


class MemoryLine:
    """The bytes come into a window of this side's memory."""

    def __init__(self, address: str) -> None:
        """Raises KindUnavailable where the depot is not on this machine."""
        self._free = list(range(WINDOW_PIECES))
        self._asked: dict[tuple[int, int], tuple[int, int]] = {}
        """Slot and size, by part and piece."""
        self._lent: int | None = None
        """The slot that the caller may be reading."""
        window = os.memfd_create("paceline-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(window, WINDOW_BYTES)
            fcntl.fcntl(window, fcntl.F_ADD_SEALS, SEALS)
            self._line = _hand_over(address, window)
            self._view = memoryview(mmap.mmap(window, WINDOW_BYTES))
        finally:
            os.close(window)
        self._poll = select.poll()
        self._poll.register(self._line, select.POLLIN)

    def ask(self, id: bytes, index: int, piece: int, size: int) -> None:
        self._take_back()
        slot = self._free.pop()
        self._asked[index, piece] = slot, size
        try:
            self._line.send(TO_DEPOT.encode(Want(id, index, piece, slot)))
        except OSError:
            raise TransferFailed("the depot is gone") from None

    def receive(self, seconds: float) -> Landed | Patience | None:
        self._take_back()
        if not self._poll.poll(seconds * 1e3):
            return None
        try:
            data = self._line.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise TransferFailed("the depot is gone")
        answer = decode_answer("the depot", memoryview(data))
        if not isinstance(answer, Piece):
            return expect_patience(answer)
        asked = self._asked.pop((answer.index, answer.piece), None)
        if asked is None:
            raise TransferFailed("the depot sent what was not asked for")
        self._lent, size = asked
        start = self._lent * PIECE_BYTES
        return Landed(answer.index, answer.piece, answer.checksum, self._view[start : start + size])

    def is_broken(self) -> bool:
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """The depot may still write to the window until it has noticed: nobody reads there any more."""
        self._line.close()

    def _take_back(self) -> None:
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None


def _hand_over(address: str, window: int) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(HELLO_SECONDS)
        line.connect(path_of(address))
        if not is_same_user(line):
            raise KindUnavailable("the depot runs as another user")
        socket.send_fds(line, [HERE], [window])
        if line.recv(len(HERE)) != HERE:
            raise KindUnavailable("the depot takes no more windows")
    except OSError as error:
        line.close()
        raise KindUnavailable(f"there is no such depot on this machine: {error}") from None
    except KindUnavailable:
        line.close()
        raise
    return line
