"""How pieces come from a depot: one kind of transfer a class. Here what they have in common, and sockets."""

from dataclasses import dataclass
from typing import Protocol

from paceline.runtime.transfer.control import Control
from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.messages import Patience, Piece, Want


@dataclass(frozen=True, slots=True)
class Landed:
    """A piece that came."""

    index: int
    piece: int
    checksum: int
    data: memoryview
    """Good until the next call of the line."""


class Line(Protocol):
    """Used by one thread at a time. Whoever breaks off a fetch closes it."""

    def ask(self, id: bytes, index: int, piece: int, size: int) -> None:
        """For a piece of `size` bytes. At most `WINDOW_PIECES` are asked for and not yet there."""

    def receive(self, seconds: float) -> Landed | Patience | None:
        """None when nothing came in time. Raises TransferFailed when nothing will."""

    def is_broken(self) -> bool: ...

    def close(self) -> None: ...


class SocketLine:
    """The bytes come along with the answers."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def ask(self, id: bytes, index: int, piece: int, size: int) -> None:
        self._control.send(Want(id, index, piece))

    def receive(self, seconds: float) -> Landed | Patience | None:
        received = self._control.receive(seconds)
        if received is None:
            return None
        answer, data = received
        if isinstance(answer, Piece):
            return Landed(answer.index, answer.piece, answer.checksum, data)
        return expect_patience(answer)

    def is_broken(self) -> bool:
        return self._control.is_broken()

    def close(self) -> None:
        self._control.close()


def expect_patience(answer: object) -> Patience:
    if not isinstance(answer, Patience):
        raise TransferFailed("the depot sent what was not asked for")
    return answer
