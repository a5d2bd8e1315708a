"""A worker that has the model, seen from one that wants it."""

import math
import socket
import threading
from typing import TypeVar
from urllib.parse import urlsplit

import torch

from paceline.core.errors import PacelineError
from paceline.models.loading.weight_manifest import Manifest, assemble, blank, host_bytes, part_sum
from paceline.models.loading.weight_parts import Piece
from paceline.runtime.transfer.client import Courier
from paceline.runtime.transfer.errors import TransferCancelled
from paceline.runtime.weights.chunks import chunk_ranges
from paceline.runtime.weights.messages import (
    TO_TAKER,
    AskPart,
    AskWeights,
    FromGiver,
    NoWeights,
    PartTicket,
    Weights,
    decode_manifest,
)
from paceline.runtime.weights.spec import PeerAddress
from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.transport import Connection

ANSWER_SECONDS = 2.0
"""A giver answers at once; whoever takes longer is no help."""
TICKET_SECONDS = 30.0
SLOWEST = 1e6
"""Bytes a second below which a source is given up."""
POLL = 0.05
M = TypeVar("M")


class SourceLost(PacelineError):
    """Nothing, or nothing more, is to be had from a peer."""


class WeightPeer:
    """A `Source`. Used by one thread at a time: `ask` first, then `bring`."""

    is_peer = True
    manifest: Manifest
    """What it has, once it was asked."""

    def __init__(self, peer: PeerAddress, security: Security | None, courier: Courier, device: torch.device) -> None:
        """`security.server`: the public key that the peer must prove to own. `device`: where weights are to go."""
        self.name = peer.name
        self._peer, self._security, self._courier, self._device = peer, security, courier, device
        self._connection: Connection[FromGiver] = Connection(peer.address, TO_TAKER, security)

    def ask(self, form: str, fingerprint: str) -> None:
        """Raises SourceLost when it is not there or has something else."""
        self._knock()
        self._connection.send(AskWeights(form, fingerprint))
        answer = self._answer(Weights, ANSWER_SECONDS, threading.Event())
        try:
            manifest = decode_manifest(answer.manifest)
        except Malformed as malformed:
            raise SourceLost(str(malformed)) from None
        if manifest.form != form or (fingerprint and manifest.fingerprint != fingerprint):
            raise SourceLost("it offers another model than it was asked for")
        self.manifest = manifest

    def second(self) -> "WeightPeer":
        """Another line to the same peer: while a part on one of them is checked, the next is under way on the other."""
        line = WeightPeer(self._peer, self._security, self._courier, self._device)
        line.manifest = self.manifest
        return line

    def bring(self, part: int, cancelled: threading.Event) -> dict[str, Piece]:
        """A part whose checksum held. Raises SourceLost, TransferFailed or TransferCancelled."""
        self._connection.send(AskPart(part))
        answer = self._answer(PartTicket, TICKET_SECONDS, cancelled)
        if answer.part != part:  # of an errand that was cancelled before it was answered
            answer = self._answer(PartTicket, TICKET_SECONDS, cancelled)
        form = self.manifest.parts[part]
        chunks = chunk_ranges(form.tensors)
        if answer.part != part or answer.ticket.sizes != [end - start for _, start, end in chunks]:
            raise SourceLost("it offers something else than was asked for")
        tensors = blank(form, pinned=self._device.type == "cuda")
        views = [host_bytes(tensor) for tensor in tensors]

        def into(index: int) -> memoryview:
            tensor, start, end = chunks[index]
            return views[tensor][start:end]

        seconds = 30.0 + form.nbytes / SLOWEST
        self._courier.fetch(answer.ticket, range(len(chunks)), into, lambda index: None, cancelled, seconds)
        if part_sum(tensors) != form.sum:
            raise SourceLost("what it sent is not what it announced: the checksum differs")
        try:
            return assemble(form, tensors, self._device)
        except ValueError as error:
            raise SourceLost(str(error)) from None

    def close(self) -> None:
        self._connection.send(Goodbye("enough"))
        self._connection.close()

    def _knock(self) -> None:
        """Whether anybody is there at all: a refusal is known at once, where a message would be waited for."""
        where = urlsplit(self._peer.address)
        try:
            socket.create_connection((where.hostname or "", where.port or 0), ANSWER_SECONDS).close()
        except OSError as error:
            raise SourceLost(f"nobody is there ({error.strerror or error})") from None

    def _answer(self, kind: type[M], seconds: float, cancelled: threading.Event) -> M:
        for _ in range(math.ceil(seconds / POLL)):
            message = self._connection.receive(POLL)
            if isinstance(message, kind):
                return message
            if isinstance(message, NoWeights | Goodbye):
                raise SourceLost(message.reason)
            if isinstance(message, Malformed):
                raise SourceLost(f"it said something that is no message: {message}")
            if cancelled.is_set():
                raise TransferCancelled("brought by another")
            if self._connection.was_cut():
                raise SourceLost("the connection broke")
        raise SourceLost(f"it did not answer within {seconds:.0f} s")
