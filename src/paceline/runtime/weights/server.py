"""The door at which a worker gives its weights to workers that start."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from torch import Tensor

from paceline.cluster.cost.weight_rate import Pace
from paceline.core.clock import Clock, WallClock
from paceline.models.loading.weight_stock import WeightStock
from paceline.runtime.transfer.handle import Ticket
from paceline.runtime.transfer.server import Depot
from paceline.runtime.transfer.transfer import Parcel, Part
from paceline.runtime.weights.chunks import chunk_bytes, chunk_ranges
from paceline.runtime.weights.messages import (
    TO_GIVER,
    AskPart,
    AskWeights,
    FromTaker,
    NoWeights,
    PartTicket,
    Weights,
    encode_manifest,
)
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.transport import Listener, Peer

logger = logging.getLogger(__name__)

MAX_TAKERS = 32
"""Lines on which something is under way."""
KEEP_SECONDS = 60.0
"""A part that is all ready and of which nothing was taken for so long is withdrawn: its taker is gone."""
IDLE_WAIT = 0.25


class _Parcel(Parcel):
    """Notes when somebody last took of it."""

    def __init__(self, sizes: Sequence[int], clock: Clock) -> None:
        super().__init__(sizes)
        self._clock = clock
        self.touched = clock.now()

    def part(self, index: int) -> Part | None:
        self.touched = self._clock.now()
        return super().part(index)


@dataclass(slots=True, eq=False)
class _Giving:
    """A part on its way to one taker."""

    ticket: Ticket
    parcel: _Parcel
    tensors: list[Tensor]
    rest: Iterator[tuple[int, tuple[int, int, int]]]
    """Chunks to be made ready."""


class WeightDoor:
    """Open from the start, so that those who ask too early hear so; gives once it has something. Chunk by chunk, takers in
    turn, no faster than its pace."""

    def __init__(
        self,
        address: str,
        security: Security | None,
        bytes_per_second: float = 0.0,
        kinds: Sequence[str] | None = None,
        is_busy: Callable[[], bool] = lambda: False,
        clock: Clock | None = None,
    ) -> None:
        self._listener: Listener[FromTaker] = Listener(address, TO_GIVER, security)
        self.address = self._listener.address
        self._depot = Depot(urlsplit(self.address).hostname or "", security, kinds)
        self._pace = Pace(bytes_per_second)
        self._clock = clock or WallClock()
        self.is_busy = is_busy
        self._stock: WeightStock | None = None
        self._givings: dict[Peer, _Giving] = {}
        self._filling: deque[Peer] = deque()
        self.bytes_given = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-weight-door", daemon=True)
        self._thread.start()

    def open(self, stock: WeightStock) -> None:
        """Give this from now on. Takes checksums of all of it first, on the calling thread."""
        _ = stock.manifest
        self._stock = stock

    def close(self) -> None:
        """Those who are being given something hear that there is no more. Safe to call twice."""
        self._stop.set()
        self._listener.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                wait = self._pace.wait(self._clock.now()) if self._filling else IDLE_WAIT
                received = self._listener.receive(min(wait, IDLE_WAIT))
                if received is not None:
                    self._hear(received.peer, received.message)
                elif self._filling and self._pace.wait(self._clock.now()) <= 0.0:
                    self._fill()
                self._expire()
        except Exception:
            logger.exception("the weight door broke; this worker serves on, and gives its weights to nobody")
        finally:
            for peer in self._givings:
                self._listener.send(peer, Goodbye("stopping"))
            self._depot.close()
            self._listener.close()

    def _hear(self, peer: Peer, message: FromTaker | Malformed) -> None:
        match message:
            case AskWeights():
                self._listener.send(peer, self._offer(message))
            case AskPart():
                self._listener.send(peer, self._give(peer, message.part))
            case Goodbye():
                self._drop(peer)

    def _offer(self, message: AskWeights) -> Weights | NoWeights:
        if self._stock is None:
            return NoWeights("it is still loading")
        manifest = self._stock.manifest
        if manifest.form != message.form:
            return NoWeights(f"it holds its weights as {manifest.form!r}, and {message.form!r} was asked for"[:512])
        if message.fingerprint and manifest.fingerprint != message.fingerprint:
            return NoWeights(f"it holds another checkpoint, of the sum {manifest.fingerprint}")
        return Weights(encode_manifest(manifest))

    def _give(self, peer: Peer, part: int) -> PartTicket | NoWeights:
        self._drop(peer)
        if self._stock is None or part >= len(self._stock.manifest.parts):
            return NoWeights("there is no such part")
        if len(self._givings) >= MAX_TAKERS:
            return NoWeights(f"it gives to {MAX_TAKERS} others already")
        chunks = chunk_ranges(self._stock.manifest.parts[part].tensors)
        parcel = _Parcel([end - start for _, start, end in chunks], self._clock)
        ticket = self._depot.offer(parcel)
        self._givings[peer] = _Giving(ticket, parcel, self._stock.tensors(part), iter(enumerate(chunks)))
        self._filling.append(peer)
        return PartTicket(part, ticket)

    def _fill(self) -> None:
        """One chunk of whoever's turn it is."""
        giving = self._givings[self._filling[0]]
        chunk = next(giving.rest, None)
        if chunk is None:
            giving.parcel.touched = self._clock.now()
            self._filling.popleft()
            return
        index, (tensor, start, end) = chunk
        began = self._clock.now()
        self.bytes_given += end - start  # first: who waits for the last chunk may look as soon as it is filled
        giving.parcel.fill(index, chunk_bytes(giving.tensors[tensor], start, end))
        self._pace.gave(end - start, began, self._clock.now(), self.is_busy())
        self._filling.rotate(-1)

    def _drop(self, peer: Peer) -> None:
        giving = self._givings.pop(peer, None)
        if giving is not None:
            self._depot.withdraw(giving.ticket)
            with suppress(ValueError):
                self._filling.remove(peer)

    def _expire(self) -> None:
        late = self._clock.now() - KEEP_SECONDS
        for peer in [p for p, one in self._givings.items() if one.parcel.touched < late and p not in self._filling]:
            self._drop(peer)
