"""NIXL, the taking side: pieces are read from the giver's shelf."""

import time
from typing import Any, NamedTuple

from paceline.runtime.transfer.channels.channel import Landed, expect_patience
from paceline.runtime.transfer.channels.nixl_agent import NixlAgent, Region
from paceline.runtime.transfer.channels.staging_buffer import GREETING
from paceline.runtime.transfer.control import Control
from paceline.runtime.transfer.errors import KindUnavailable, TransferFailed
from paceline.runtime.transfer.messages import Meet, Met, Patience, Piece, Taken, Want
from paceline.runtime.transfer.pieces import PIECE_BYTES, WINDOW_PIECES, checksum

HELLO_SECONDS = 5.0
"""The first taker of all waits for the depot to start NIXL."""
END_SECONDS = 1.0
"""What is under way when a line is closed gets so long to arrive."""
GLANCE_SECONDS = 50e-6


class _Read(NamedTuple):
    piece: Piece
    slot: int
    size: int
    handle: Any


class NixlLine:
    """The giver says on which shelf a piece lies, this side reads it into a slot of its own and says so."""

    def __init__(self, agent: NixlAgent, control: Control) -> None:
        """Raises KindUnavailable where NIXL does not lead there."""
        self._agent = agent
        self._control = control
        self._free = list(range(WINDOW_PIECES))
        self._sizes: dict[tuple[int, int], int] = {}
        self._reads: list[_Read] = []
        self._lent: int | None = None
        self._peer: str | None = None
        self._region: Region | None = None
        try:
            self._meet(time.monotonic() + HELLO_SECONDS)
        except (KindUnavailable, TransferFailed) as failed:
            self.close()
            raise KindUnavailable(str(failed)) from None

    def ask(self, id: bytes, index: int, piece: int, size: int) -> None:
        self._take_back()
        self._sizes[index, piece] = size
        self._control.send(Want(id, index, piece, slot=0))

    def receive(self, seconds: float) -> Landed | Patience | None:
        self._take_back()
        until = time.monotonic() + seconds
        while True:
            for read in self._reads:
                if read.handle is None or self._agent.is_done(read.handle):
                    return self._land(read)
            received = self._control.receive(0.0 if self._reads else max(0.0, until - time.monotonic()))
            if received is not None:
                answer, _ = received
                if not isinstance(answer, Piece):
                    return expect_patience(answer)
                self._begin(answer)
            elif time.monotonic() >= until:
                return None
            elif self._reads:
                time.sleep(GLANCE_SECONDS)

    def is_broken(self) -> bool:
        return self._control.is_broken()

    def close(self) -> None:
        self._control.close()
        until = time.monotonic() + END_SECONDS
        try:
            while self._reads and time.monotonic() < until:
                self._reads = [read for read in self._reads if read.handle and not self._agent.is_done(read.handle)]
                time.sleep(GLANCE_SECONDS)
        except TransferFailed:
            pass
        for read in self._reads:
            self._agent.abort(read.handle)
        if self._peer is not None:
            self._agent.part(self._peer)
        # Bytes that did not arrive may still land in the region: then it stays, and nobody uses it again
        if self._region is not None and not self._reads:
            self._agent.release(self._region)

    def _meet(self, until: float) -> None:
        """Reads the greeting: that the depot can be reached at all says nothing about NIXL's own connections."""
        self._control.send(Meet())
        met: object = None
        while not isinstance(met, Met):
            received = self._control.receive(max(0.0, until - time.monotonic()))
            if received is None:
                raise KindUnavailable("the depot does not answer")
            met, _ = received
        self._shelf = met.address
        self._peer = self._agent.meet(met.metadata)
        self._region = self._agent.register(WINDOW_PIECES * PIECE_BYTES)
        self._sizes[0, 0] = GREETING.nbytes
        self._begin(Piece(0, 0, checksum(GREETING), met.slot))
        greeting = self.receive(until - time.monotonic())
        while isinstance(greeting, Patience):
            greeting = self.receive(until - time.monotonic())
        if greeting is None or greeting.data != GREETING:
            raise KindUnavailable("NIXL reads nothing from the depot")

    def _begin(self, piece: Piece) -> None:
        size = self._sizes.pop((piece.index, piece.piece), None)
        if size is None or piece.slot < 0:
            raise TransferFailed("the depot sent what was not asked for")
        assert self._region is not None
        assert self._peer is not None
        slot = self._free.pop()
        remote, local = self._shelf + piece.slot * PIECE_BYTES, self._region.address + slot * PIECE_BYTES
        handle = self._agent.read(self._peer, remote, local, size) if size else None
        self._reads.append(_Read(piece, slot, size, handle))

    def _land(self, read: _Read) -> Landed:
        assert self._region is not None
        self._reads.remove(read)
        piece, slot, size, _ = read
        self._control.send(Taken(piece.slot))
        self._lent = slot
        start = slot * PIECE_BYTES
        return Landed(piece.index, piece.piece, piece.checksum, self._region.view[start : start + size])

    def _take_back(self) -> None:
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None
