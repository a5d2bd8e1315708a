"""What NIXL takers read from: copies of pieces in memory that is registered once.

Parts are not registered themselves. They come and go by the thousand, and a read that is under way while its memory is
freed takes the giver down with it; the shelf stays where it is.
"""

from typing import NamedTuple

from paceline.runtime.transfer.channels.nixl_agent import NixlAgent
from paceline.runtime.transfer.errors import KindUnavailable
from paceline.runtime.transfer.fair_queue import Taker
from paceline.runtime.transfer.messages import Met
from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES, copy

NUM_SLOTS = 4 * WINDOW_PIECES
GREETING = memoryview(b"paceline" * 8)
LENT_SECONDS = 10.0
"""A taker that has not read a piece after so long is no taker."""


class Loan(NamedTuple):
    taker: Taker
    since: float


class Shelf:
    """Belongs to the depot's thread."""

    def __init__(self) -> None:
        """Raises KindUnavailable where NIXL does not work."""
        self._agent = NixlAgent("depot")
        self._region = self._agent.register(NUM_SLOTS * PIECE_BYTES)
        self._free = list(range(NUM_SLOTS))
        self._lent: dict[int, Loan] = {}
        self._metadata = self._agent.metadata()

    def has_room(self, taker: Taker) -> bool:
        """A taker has as many slots at once as it has places to read into."""
        return bool(self._free) and sum(loan.taker == taker for loan in self._lent.values()) < WINDOW_PIECES

    @property
    def is_read(self) -> bool:
        """Whether somebody may be reading: until they are done, `progress` is wanted often."""
        return bool(self._lent)

    def lay(self, taker: Taker, data: memoryview, now: float) -> int:
        """The slot where `data` now is, `taker`'s until it says so, leaves, or does not come for it."""
        slot = self._free.pop()
        start = slot * PIECE_BYTES
        copy(data, self._region.view[start : start + data.nbytes])
        self._lent[slot] = Loan(taker, now)
        return slot

    def meet(self, taker: Taker, now: float) -> Met:
        """Raises KindUnavailable when so many read that there is no slot to begin with."""
        if not self.has_room(taker):
            raise KindUnavailable("too many read from the shelf")
        return Met(self._metadata, self._region.address, self.lay(taker, GREETING, now))

    def taken(self, taker: Taker, slot: int) -> None:
        if slot in self._lent and self._lent[slot].taker == taker:
            del self._lent[slot]
            self._free.append(slot)

    def drop(self, taker: Taker) -> None:
        for slot, loan in list(self._lent.items()):
            if loan.taker == taker:
                self.taken(taker, slot)

    def takers(self) -> set[Taker]:
        return {loan.taker for loan in self._lent.values()}

    def overdue(self, now: float) -> set[Taker]:
        return {loan.taker for loan in self._lent.values() if now - loan.since >= LENT_SECONDS}

    def progress(self) -> None:
        self._agent.progress()
