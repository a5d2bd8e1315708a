"""Serves a depot's takers: reads what they want and gives it to them, in turn."""

import logging
import time

import zmq

from paceline.runtime.transfer.channels.sockets import Socket
from paceline.runtime.transfer.channels.staging_buffer import Shelf
from paceline.runtime.transfer.channels.windows import Windows
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed
from paceline.runtime.transfer.fair_queue import Taker, Turn, Turns
from paceline.runtime.transfer.messages import (
    TO_COURIER,
    TO_DEPOT,
    Meet,
    Patience,
    Piece,
    Refused,
    ToCourier,
    Want,
)
from paceline.runtime.transfer.pieces import num_pieces, piece_range
from paceline.runtime.transfer.registry import Stock
from paceline.runtime.wire.codec import Malformed

PATIENCE_SECONDS = 1.0
"""How often those who wait are told that they are not forgotten."""
PROGRESS_MS = 1
"""How often NIXL is driven while somebody may be reading: without hardware for it, reads move only then."""
READ_AT_ONCE, SERVED_AT_ONCE = 256, 4
GONE = "the parcel is not here: it was withdrawn, or never offered"

logger = logging.getLogger(__name__)


class Clerk:
    """Belongs to the depot's thread. Takers that leave, do not read or want what there is not cost the others nothing."""

    def __init__(self, socket: Socket, stock: Stock, windows: Windows | None, has_nixl: bool) -> None:
        self._socket = socket
        self._stock = stock
        self._windows = windows
        self._no_shelf = None if has_nixl else "NIXL is not offered here"
        self._shelf: Shelf | None = None
        """From the first taker by NIXL on: it takes a moment to set up."""
        self._turns = Turns()
        self._is_stuck = False
        """Whether those whose turn it is all wait for room on the shelf."""
        self._reminded = time.monotonic()

    @property
    def pause_ms(self) -> int:
        """How long it may be left alone when nothing happens."""
        if self._turns.has_ready and not self._is_stuck:
            return 0
        return PROGRESS_MS if self._shelf is not None and self._shelf.is_read else int(PATIENCE_SECONDS * 1e3)

    def work(self) -> None:
        """A little of everything."""
        self._look_at_changes()
        self._read()
        self._is_stuck = sum(self._serve() for _ in range(SERVED_AT_ONCE)) == 0
        if self._shelf is not None and self._shelf.is_read:
            self._shelf.progress()
        now = time.monotonic()
        if now - self._reminded >= PATIENCE_SECONDS:
            self._reminded = now
            self._remind(now)

    def _look_at_changes(self) -> None:
        for id in self._stock.changes():
            parcel = self._stock.get(id)
            if parcel is None:
                self._refuse(self._turns.withdraw(id), GONE)
                continue
            for index in self._turns.waited_for(id):
                try:
                    if parcel.part(index) is not None:
                        self._turns.ready(id, index)
                except TransferFailed as failed:
                    self._refuse(self._turns.give_up(id, index), str(failed))

    def attend(self, windows: Windows) -> None:
        for taker, message in windows.attend():
            if message is None:
                self._drop(taker)
            else:
                self._hear(taker, message)

    def _read(self) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                taker, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._hear(taker, frames[0] if len(frames) == 1 else b"")

    def _hear(self, taker: Taker, data: bytes) -> None:
        try:
            message = TO_DEPOT.decode(data)
        except Malformed:
            return
        if isinstance(message, Want):
            self._want(taker, message)
        elif isinstance(message, Meet):
            self._meet(taker)
        elif self._shelf is not None:
            self._shelf.taken(taker, message.slot)

    def _want(self, taker: Taker, want: Want) -> None:
        parcel = self._stock.get(want.id)
        if parcel is None:
            return self._refuse({taker}, GONE)
        if want.index >= len(parcel.sizes) or want.piece >= num_pieces(parcel.sizes[want.index]):
            return self._refuse({taker}, "there is no such part")
        if not self._turns.has_room(taker):
            return self._refuse({taker}, "too much is wanted at once")
        try:
            self._turns.add(Turn(taker, want), parcel.part(want.index) is not None)
        except TransferFailed as failed:
            self._refuse({taker}, str(failed))

    def _meet(self, taker: Taker) -> None:
        try:
            shelf = self._set_up_shelf()
            self._send(taker, shelf.meet(taker, time.monotonic()))
        except KindUnavailable as unavailable:
            self._refuse({taker}, str(unavailable))

    def _set_up_shelf(self) -> Shelf:
        if self._shelf is None:
            if self._no_shelf is not None:
                raise KindUnavailable(self._no_shelf)
            try:
                self._shelf = Shelf()
            except Exception as error:  # whatever is wrong with NIXL, the other kinds go on
                self._no_shelf = str(error)
                raise KindUnavailable(self._no_shelf) from None
        return self._shelf

    def _serve(self) -> bool:
        """Whether somebody was."""
        turn = self._turns.next()
        if turn is None:
            return False
        taker, want = turn
        parcel = self._stock.get(want.id)
        part = None if parcel is None else parcel.part(want.index)
        if part is None:
            self._refuse({taker}, GONE)
            return True
        start, end = piece_range(part.data.nbytes, want.piece)
        data, sum = part.data[start:end], part.checksums[want.piece]
        if want.slot < 0:
            self._send(taker, Piece(want.index, want.piece, sum), data)
        elif isinstance(taker, str) and self._windows is not None and self._windows.place(taker, want.slot, data):
            self._send(taker, Piece(want.index, want.piece, sum))
        elif isinstance(taker, str) or self._shelf is None:
            self._refuse({taker}, "there is no such place")
        elif self._shelf.has_room(taker):
            self._send(taker, Piece(want.index, want.piece, sum, self._shelf.lay(taker, data, time.monotonic())))
        else:
            self._turns.add(turn, True)
            return False
        return True

    def _remind(self, now: float) -> None:
        waiting = self._turns.waiting()
        if self._shelf is not None:
            for taker in self._shelf.overdue(now):
                self._refuse({taker}, "a piece was not read in time")
                self._drop(taker)
            waiting |= self._shelf.takers()
        for taker in waiting:
            self._send(taker, Patience())

    def _refuse(self, takers: set[Taker], reason: str) -> None:
        for taker in takers:
            self._send(taker, Refused(reason[:512]))

    def _send(self, taker: Taker, message: ToCourier, data: memoryview | None = None) -> None:
        encoded = TO_COURIER.encode(message)
        if isinstance(taker, str):
            if data is not None or self._windows is None or not self._windows.send(taker, encoded):
                self._drop(taker)
            return
        try:
            self._socket.send_multipart([taker, encoded], zmq.DONTWAIT | (0 if data is None else zmq.SNDMORE))
            if data is not None:
                self._socket.send(data, zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:  # EHOSTUNREACH: a taker that left; EAGAIN: one that does not read
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._drop(taker)

    def _drop(self, taker: Taker) -> None:
        self._turns.drop(taker)
        if isinstance(taker, str) and self._windows is not None:
            self._windows.leave(taker)
        if self._shelf is not None:
            self._shelf.drop(taker)
