"""One fetch under way: what is asked for, what came, and where it goes."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from paceline.runtime.transfer.channels.channel import Landed, Line
from paceline.runtime.transfer.errors import TransferCancelled, TransferFailed
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.pieces import WINDOW_PIECES, copy, num_pieces, piece_range

SILENCE_SECONDS = 10.0
"""A depot that says nothing for so long is taken for dead: those who wait hear from it every second."""
LOOK_SECONDS = 0.02
"""How often a fetch that waits looks whether it is cancelled."""


class Fetch:
    """Does what `Courier.fetch` promises, over one line."""

    def __init__(
        self,
        line: Line,
        ticket: Ticket,
        wanted: Sequence[int],
        into: Callable[[int], memoryview],
        arrived: Callable[[int], None],
        cancelled: threading.Event | None,
        timeout: float,
    ) -> None:
        self._line = line
        self._ticket = ticket
        self._wanted = wanted
        self._into = into
        self._arrived = arrived
        self._cancelled = cancelled
        self._timeout = timeout
        self._asked: set[tuple[int, int]] = set()
        self._places: dict[int, memoryview] = {}
        self._missing = {index: num_pieces(ticket.sizes[index]) for index in wanted}
        """Pieces of each part that are not there yet."""

    def run(self) -> None:
        started = heard = time.monotonic()
        pieces = self._pieces()
        while self._missing:
            while len(self._asked) < WINDOW_PIECES and (piece := next(pieces, None)) is not None:
                self._asked.add(piece)
                self._line.ask(self._ticket.id, *piece, self._size(*piece))
            if self._cancelled is not None and self._cancelled.is_set():
                raise TransferCancelled("the transfer was cancelled")
            if time.monotonic() - started >= self._timeout:
                raise TransferFailed(f"{len(self._missing)} parts had not arrived after {self._timeout:g} s")
            answer = self._line.receive(LOOK_SECONDS)
            if isinstance(answer, Landed):
                self._land(answer)
            if answer is not None:
                heard = (
                    time.monotonic()
                )  # not before it has landed: however long that took, it was not the depot's silence
            elif time.monotonic() - heard >= SILENCE_SECONDS:
                raise TransferFailed(f"the depot said nothing for {SILENCE_SECONDS:g} s")

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for index in self._wanted:
            for piece in range(num_pieces(self._ticket.sizes[index])):
                yield index, piece

    def _size(self, index: int, piece: int) -> int:
        start, end = piece_range(self._ticket.sizes[index], piece)
        return end - start

    def _land(self, landed: Landed) -> None:
        index, piece, data = landed.index, landed.piece, landed.data
        if (index, piece) not in self._asked:
            raise TransferFailed("the depot sent what was not asked for")
        self._asked.remove((index, piece))
        place = self._place(index)
        start, end = piece_range(place.nbytes, piece)
        if data.nbytes != end - start or copy(data, place[start:end]) != landed.checksum:
            raise TransferFailed(f"part {index} is corrupt: its checksum does not hold")
        self._missing[index] -= 1
        if not self._missing[index]:
            del self._missing[index], self._places[index]
            place.release()
            self._arrived(index)

    def _place(self, index: int) -> memoryview:
        place = self._places.get(index)
        if place is None:
            given, size = self._into(index), self._ticket.sizes[index]
            if given.nbytes != size or given.readonly or not given.c_contiguous:
                raise ValueError(f"the place for part {index} is not {size} writable, contiguous bytes")
            place = self._places[index] = given.cast("B") if size else memoryview(bytearray())
        return place
