"""Loads weights from another worker.

A part arrives in chunks: `HostPart` in its own memory on the host, `StagedPart` on its way to a GPU. `SharedParts` are weights
in device memory that a worker on the same machine copies itself: no byte of them passes through the host.
"""

import logging
import math
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from paceline.core.errors import PacelineError
from paceline.models.device import StreamEvent, side_stream, staging_bytes
from paceline.models.manifest.manifest import (
    DTYPES,
    ExportedWeights,
    Manifest,
    PartForm,
    assemble,
    empty_part,
    tensor_bytes,
)
from paceline.models.manifest.parts import Piece
from paceline.models.memory import memory_checksum
from paceline.transfer import ChannelUnavailable, DeviceMemory, TransferCancelled, TransferClient
from paceline.transfer.weights.sources import (
    CHUNK_BYTES,
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
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import Goodbye
from paceline.wire.keys import Security
from paceline.wire.transfer_messages import MemoryRegion
from paceline.wire.transport import Connection
from paceline.wire.worker_spec import PeerAddress

logger = logging.getLogger(__name__)

MAX_BUFFERS = 8
"""Buffers of a part. A fetch has fewer chunks in flight, and the remaining buffers are being copied to the device."""


class HostPart:
    """Receives `chunks` in the memory of the tensors. `get_buffer` and `copy` are the callbacks of a fetch."""

    def __init__(self, form: PartForm, chunks: Sequence[tuple[int, int, int]]) -> None:
        """`chunks` has (tensor, start, end) of each chunk, in bytes."""
        self._chunks, self.tensors = chunks, empty_part(form)
        self._views = [tensor_bytes(tensor) for tensor in self.tensors]

    def get_buffer(self, index: int) -> memoryview:
        tensor, start, end = self._chunks[index]
        return self._views[tensor][start:end]

    def copy(self, index: int) -> None:
        """The chunk is where it belongs."""

    def checksum(self) -> str:
        return memory_checksum(self.tensors)


class _DevicePart:
    """The tensors of a part on a device, which a stream of its own fills. Used by one thread."""

    def __init__(self, form: PartForm, device: torch.device) -> None:
        self._stream = side_stream(device)
        with self._stream:  # Another stream may still use memory that it has freed
            self.tensors = [
                torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device=device) for tensor in form.tensors
            ]

    def checksum(self) -> str:
        """Wait for all copies and return the checksum of the tensors."""
        with self._stream:
            return memory_checksum(self.tensors)


class StagedPart(_DevicePart):
    """Receives `chunks` in a few buffers and copies them to a device."""

    def __init__(self, form: PartForm, chunks: Sequence[tuple[int, int, int]], device: torch.device) -> None:
        """`chunks` has (tensor, start, end) of each chunk, in bytes."""
        super().__init__(form, device)
        self._chunks, self._device = chunks, device
        self._targets = [tensor.view(-1).view(torch.uint8) for tensor in self.tensors]
        self._filling: dict[int, memoryview] = {}
        """Buffers that chunks arrive in."""
        self._copied: deque[tuple[memoryview, StreamEvent]] = deque()
        """Buffers that the device reads until it has reached their event, in this order."""
        self._num_buffers = 0

    def get_buffer(self, index: int) -> memoryview:
        """Memory for a chunk. Waits for the device if all buffers are in use."""
        if self._num_buffers < MAX_BUFFERS or not self._copied:
            self._num_buffers += 1
            buffer = staging_bytes(CHUNK_BYTES, self._device)
        else:
            buffer, event = self._copied.popleft()
            event.wait()
        self._filling[index] = buffer
        _, start, end = self._chunks[index]
        return buffer[: end - start]

    @torch.inference_mode()
    def copy(self, index: int) -> None:
        """Start to copy a chunk that has arrived."""
        (tensor, start, end), buffer, event = self._chunks[index], self._filling.pop(index), StreamEvent(self._device)
        with self._stream:
            arrived = torch.frombuffer(buffer, dtype=torch.uint8, count=end - start)
            self._targets[tensor][start:end].copy_(arrived, non_blocking=True)
            event.record()
        self._copied.append((buffer, event))


class SharedParts:
    """The parts of a model on a device that other processes can map. Used by one thread."""

    def __init__(self, weights: ExportedWeights, memory: DeviceMemory) -> None:
        self._weights, self._memory = weights, memory
        self._found: dict[int, list[MemoryRegion]] = {}
        last = self.find(len(weights.manifest.parts) - 1)
        self.probe = last[0] if last else None
        """A region to test whether a client can map this memory. None if no client can."""

    def find(self, part: int) -> list[MemoryRegion]:
        """Memory of the part's tensors, in the order of the manifest. Empty if it cannot be mapped, such as that of the
        tokenizer."""
        if part not in self._found:
            self._found[part] = self._share(part)
        return self._found[part]

    def _share(self, part: int) -> list[MemoryRegion]:
        try:
            return [self._memory.share(tensor) for tensor in self._weights.tensors(part)]
        except ChannelUnavailable as unavailable:
            logger.info("part %d of the weights is sent as bytes: %s", part, unavailable)
            return []


class PartCopy(_DevicePart):
    """Copies one part from the device memory of another worker."""

    def __init__(
        self, form: PartForm, regions: Sequence[MemoryRegion], memory: DeviceMemory, device: torch.device
    ) -> None:
        """Raises ChannelUnavailable if a region cannot be mapped, ValueError if it is not the memory of its tensor."""
        if [region.size for region in regions] != [tensor.nbytes for tensor in form.tensors]:
            raise ValueError("its regions of memory have other sizes than its tensors")
        self._sources = [memory.open(region) for region in regions]
        super().__init__(form, device)

    @torch.inference_mode()
    def copy(self, index: int) -> None:
        """Start to copy one tensor."""
        with self._stream:
            as_bytes(self.tensors[index]).copy_(self._sources[index])


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


MANIFEST_SECONDS = 2.0
"""Timeout for the manifest. A server answers at once."""
PART_SECONDS = 30.0
MIN_BYTES_PER_SECOND = 1e6
"""Rate below which a source has failed."""
POLL_SECONDS = 0.05
OTHER_CHECKSUM = "the weights that it sent do not match its manifest: the checksum differs"
M = TypeVar("M")


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
        """Whether it copies the peer's device memory. It is known after `connect`."""
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
