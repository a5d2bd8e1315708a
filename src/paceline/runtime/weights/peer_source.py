"""The source that loads weights from another worker."""

import logging
import math
import socket
import threading
from typing import TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.models.loading.weight_manifest import Manifest, PartForm, assemble
from paceline.models.loading.weight_parts import Piece
from paceline.runtime.transfer.client import TransferClient
from paceline.runtime.transfer.device_memory import DeviceMemory
from paceline.runtime.transfer.transfer import ChannelUnavailable, TransferCancelled
from paceline.runtime.weights.device_parts import PartCopy
from paceline.runtime.weights.messages import (
    TO_WEIGHT_CLIENT,
    FromWeightServer,
    PartReply,
    PartRequest,
    WeightsRefused,
    WeightsReply,
    WeightsRequest,
    chunk_ranges,
    decode_manifest,
)
from paceline.runtime.weights.received_part import HostPart, StagedPart
from paceline.runtime.weights.spec import PeerAddress
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.keys import Security
from paceline.runtime.wire.messages import Goodbye
from paceline.runtime.wire.transport import Connection

MANIFEST_SECONDS = 2.0
"""Timeout for the manifest. A server answers at once."""
PART_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 1e6
"""Rate below which a source has failed."""
POLL_SECONDS = 0.05
OTHER_CHECKSUM = "the weights that it sent do not match its manifest: the checksum differs"
M = TypeVar("M")

logger = logging.getLogger(__name__)


class SourceFailed(PacelineError):
    """The peer cannot send weights, or no more of them."""


class PeerSource:
    """A `Source`. Used by one thread at a time: `connect` first, then `load`."""

    is_peer = True
    manifest: Manifest
    """The peer's manifest, after `connect`."""

    def __init__(
        self,
        peer: PeerAddress,
        security: Security | None,
        client: TransferClient,
        device: torch.device,
        memory: DeviceMemory | None = None,
    ) -> None:
        """`security.server` is the public key of the peer. The weights are loaded on `device`. `memory` is the memory of
        `device`, if it may be copied from a peer's memory of its kind."""
        self.name = peer.name
        self._peer, self._security, self._client, self._device = peer, security, client, device
        self._memory = memory
        """Memory of the device. None if weights arrive as bytes."""
        self._connection: Connection[FromWeightServer] = Connection(peer.address, TO_WEIGHT_CLIENT, security)

    def connect(self, form: str, fingerprint: str) -> None:
        """Request the manifest. Raises SourceFailed if the peer is not reachable or has other weights."""
        self._check_reachable()
        self._connection.send(WeightsRequest(form, fingerprint))
        reply = self._receive(WeightsReply, MANIFEST_SECONDS, threading.Event())
        try:
            manifest = decode_manifest(reply.manifest)
        except MalformedMessage as malformed:
            raise SourceFailed(str(malformed)) from None
        if manifest.form != form or (fingerprint and manifest.fingerprint != fingerprint):
            raise SourceFailed("it offers another model than requested")
        self.manifest = manifest
        self._memory = self._test(reply)

    @property
    def is_in_place(self) -> bool:
        """Whether it copies the peer's device memory. Known after `connect`."""
        return self._memory is not None

    def duplicate(self) -> "PeerSource":
        """A second connection to the same peer, which receives a part while the first connection verifies its own part."""
        other = PeerSource(self._peer, self._security, self._client, self._device, self._memory)
        other.manifest = self.manifest
        return other

    def load(self, part: int, cancelled: threading.Event) -> dict[str, Piece]:
        """The weights of a part, verified. Raises SourceFailed, TransferFailed or TransferCancelled."""
        self._connection.send(PartRequest(part, self.is_in_place))
        reply = self._receive(PartReply, PART_SECONDS, cancelled)
        if reply.part != part:  # the late reply to a cancelled request
            reply = self._receive(PartReply, PART_SECONDS, cancelled)
        if reply.part != part:
            raise SourceFailed("it offers another part than requested")
        form = self.manifest.parts[part]
        tensors = self._copy(form, reply, cancelled) if reply.regions else self._fetch(form, reply, cancelled)
        try:
            return assemble(form, tensors, self._device)
        except ValueError as error:
            raise SourceFailed(str(error)) from None

    def _fetch(self, form: PartForm, reply: PartReply, cancelled: threading.Event) -> list[Tensor]:
        """The tensors of a part, sent as bytes."""
        chunks = chunk_ranges(form.tensors)
        if reply.handle.sizes != [end - start for _, start, end in chunks]:
            raise SourceFailed("it offers another part than requested")
        part = HostPart(form, chunks) if self._device.type == "cpu" else StagedPart(form, chunks, self._device)
        timeout = 30.0 + form.nbytes / MIN_BYTES_PER_SECOND
        self._client.fetch(reply.handle, range(len(chunks)), part.get_buffer, part.copy, cancelled, timeout)
        if part.checksum() != form.sum:
            raise SourceFailed(OTHER_CHECKSUM)
        return part.tensors

    def _copy(self, form: PartForm, reply: PartReply, cancelled: threading.Event) -> list[Tensor]:
        """The tensors of a part, copied from the peer's device memory as it permits."""
        if self._memory is None or any(reply.handle.sizes):
            raise SourceFailed("it offers its device memory, which was not requested")
        try:
            part = PartCopy(form, reply.regions, self._memory, self._device)
        except (ChannelUnavailable, ValueError) as error:
            raise SourceFailed(str(error)) from None
        indices, timeout = range(len(reply.handle.sizes)), 30.0 + form.nbytes / MIN_BYTES_PER_SECOND
        self._client.fetch(reply.handle, indices, lambda index: memoryview(bytearray()), part.copy, cancelled, timeout)
        if part.checksum() != form.sum:
            raise SourceFailed(OTHER_CHECKSUM)
        return part.tensors

    def _test(self, reply: WeightsReply) -> DeviceMemory | None:
        """The device memory, if this process can map that of the peer."""
        if self._memory is None or reply.memory is None:
            return None
        try:
            self._memory.open(reply.memory)
        except ChannelUnavailable as unavailable:
            logger.info("%s sends its weights through the host: %s", self.name, unavailable)
            return None
        return self._memory

    def close(self) -> None:
        self._connection.send(Goodbye("all parts are loaded"))
        self._connection.close()

    def _check_reachable(self) -> None:
        """A TCP connection is refused at once, while a message to a dead peer would time out."""
        url = urlsplit(self._peer.address)
        try:
            socket.create_connection((url.hostname or "", url.port or 0), MANIFEST_SECONDS).close()
        except OSError as error:
            raise SourceFailed(f"it is not reachable ({error.strerror or error})") from None

    def _receive(self, kind: type[M], seconds: float, cancelled: threading.Event) -> M:
        for _ in range(math.ceil(seconds / POLL_SECONDS)):
            message = self._connection.receive(POLL_SECONDS)
            if isinstance(message, kind):
                return message
            if isinstance(message, WeightsRefused | Goodbye):
                raise SourceFailed(message.reason)
            if isinstance(message, MalformedMessage):
                raise SourceFailed(f"it sent an invalid message: {message}")
            if cancelled.is_set():
                raise TransferCancelled("another source has loaded the part")
            if self._connection.was_disconnected():
                raise SourceFailed("the connection broke")
        raise SourceFailed(f"it did not answer within {seconds:.0f} s")
