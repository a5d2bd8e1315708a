"""The sources that load parts of a model in parallel, the queue that assigns parts to them, and the messages of peers.

A source that fails is dropped. The messages are those between a worker that loads a model and a worker that has it. The weights
themselves are transfers.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol, TypeAlias

import msgspec
import torch
from msgspec import Meta

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError, UnsupportedModel
from paceline.kernels.cpu import native
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.models.loading import StreamedWeights
from paceline.models.manifest.manifest import Manifest, TensorForm, piece_tensors
from paceline.models.manifest.parts import CheckpointParts, Parts, Piece, tokenizer_to_tensor
from paceline.models.memory import memory_checksum
from paceline.models.weights import Checkpoint
from paceline.transfer import TransferCancelled
from paceline.wire.codec import Codec, MalformedMessage
from paceline.wire.draft_messages import Count, Goodbye, Message, Name
from paceline.wire.transfer_messages import MemoryRegion, TransferHandle

logger = logging.getLogger(__name__)

OVERDUE_SECONDS = 2.0
"""Shortest time after which a part is overdue. One that also took three times the mean is assigned to a second source."""
OVERDUE_POLL_SECONDS = 0.2


class Source(Protocol):
    """Used by one thread."""

    name: str
    is_peer: bool

    def load(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        """The weights of a part. Any exception but `TransferCancelled` means that the source has failed."""
        ...

    def close(self) -> None: ...


class DiskSource:
    """A checkpoint on this machine."""

    name, is_peer = "disk", False

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        quantization: Quantization | None,
        activations: Activations = "int8",
        manifest: Manifest | None = None,
    ) -> None:
        """`manifest` has the checksums of the peers that sent other parts, which parts from disk must match."""
        self._checkpoint, self._manifest = checkpoint, manifest
        self._parts = Parts.of(checkpoint.config)
        self._stored = CheckpointParts(checkpoint, device, dtype, quantization, activations)

    def load(self, part: int, cancelled: threading.Event) -> Mapping[str, Piece]:
        if part == self._parts.tokenizer:
            return {"tokenizer": tokenizer_to_tensor(self._checkpoint.read_tokenizer())}
        with native.single_threaded_torch():  # as in `build_model`
            pieces = self._stored.read(part)
        if self._manifest is not None:
            tensors = [tensor for piece in pieces.values() for tensor in piece_tensors(piece)]
            if memory_checksum(tensors) != self._manifest.parts[part].sum:
                raise UnsupportedModel(
                    f"the {self._parts.name(part)} on disk differs from the peers': the checkpoint was changed after they "
                    "were started; restart them, or restore it"
                )
        return pieces

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class Assignment:
    """A part that a source loads."""

    part: int
    source: str
    started: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when another source has loaded the part, or the queue is closed."""


class PartQueue:
    """Parts in order, each loaded once. Sources call it from their threads."""

    def __init__(self, parts: list[int], clock: Clock | None = None) -> None:
        self._waiting = sorted(parts)
        self._assigned: list[Assignment] = []
        self._missing = set(parts)
        self._clock = clock or WallClock()
        self._mean_seconds = 0.0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, source: str) -> Assignment | None:
        """The next part to load. Waits while other sources may still fail. None when all parts are loaded."""
        with self._changed:
            while True:
                if self._is_closed or not self._missing:
                    return None
                part = self._next(source)
                if part is not None:
                    assignment = Assignment(part, source, self._clock.now())
                    self._assigned.append(assignment)
                    return assignment
                self._changed.wait(OVERDUE_POLL_SECONDS)

    def complete(self, assignment: Assignment) -> bool:
        """Whether this source is the first to load the part."""
        with self._changed:
            self._assigned.remove(assignment)
            if assignment.part not in self._missing:
                return False
            self._missing.discard(assignment.part)
            seconds = self._clock.now() - assignment.started
            self._mean_seconds = seconds if not self._mean_seconds else 0.7 * self._mean_seconds + 0.3 * seconds
            for other in self._assigned:
                if other.part == assignment.part:
                    other.cancelled.set()
            self._changed.notify_all()
            return True

    def fail(self, assignment: Assignment) -> None:
        """Return the part to the queue, unless another source loads it too."""
        with self._changed:
            self._assigned.remove(assignment)
            if assignment.part in self._missing and not any(
                assigned.part == assignment.part for assigned in self._assigned
            ):
                self._waiting = sorted([*self._waiting, assignment.part])
            self._changed.notify_all()

    def close(self) -> None:
        """Cancel all assignments."""
        with self._changed:
            self._is_closed = True
            for assignment in self._assigned:
                assignment.cancelled.set()
            self._changed.notify_all()

    def _next(self, source: str) -> int | None:
        if self._waiting:
            return self._waiting.pop(0)
        limit = self._clock.now() - max(OVERDUE_SECONDS, 3.0 * self._mean_seconds)
        by_part: dict[int, list[Assignment]] = {}
        for assignment in self._assigned:
            by_part.setdefault(assignment.part, []).append(assignment)
        overdue = (
            part for part, (first, *others) in sorted(by_part.items()) if not others and first.started < limit
        )  # fmt: skip
        return next((part for part in overdue if by_part[part][0].source != source), None)


class WeightSources:
    """A thread for each source, which loads parts of `queue` into `streamed`. When the last source fails, `fallback` creates
    another source. If that raises, steps that wait for a layer get its exception."""

    def __init__(
        self, streamed: StreamedWeights, queue: PartQueue, fallback: Callable[[], Source] | None = None
    ) -> None:
        self._streamed, self._queue, self._fallback = streamed, queue, fallback
        self._lock = threading.Lock()
        self._active: set[Source] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    @property
    def active_peers(self) -> set[str]:
        """Names of the peers that still send parts."""
        with self._lock:
            return {source.name for source in self._active if source.is_peer}

    def add(self, *sources: Source) -> None:
        """Start the sources. One call starts all, so that an early failure does not count as that of the last source."""
        with self._lock:
            if self._is_closed:
                return
            self._active.update(sources)
            for source in sources:
                name = f"paceline-weights-{source.name}"
                self._threads.append(threading.Thread(target=self._run, args=(source,), name=name, daemon=True))
                self._threads[-1].start()

    def close(self, error: PacelineError) -> None:
        """Stop. Steps that still wait for a part get `error`."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads)
        self._queue.close()
        if not self._streamed.is_complete:
            self._streamed.fail(error)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, source: Source) -> None:
        failure: Exception | None = None
        try:
            while failure is None and (assignment := self._queue.take(source.name)) is not None:
                try:
                    pieces = source.load(assignment.part, assignment.cancelled)
                except TransferCancelled:
                    self._queue.fail(assignment)
                except Exception as error:
                    self._queue.fail(assignment)
                    failure = error
                else:
                    if self._queue.complete(assignment):
                        self._streamed.put(assignment.part, pieces)
        finally:
            source.close()
            self._remove(source, failure)

    def _remove(self, source: Source, failure: Exception | None) -> None:
        with self._lock:
            self._active.discard(source)
            is_last = not self._active and not self._is_closed
        if failure is None:
            return
        consequence = "the rest is loaded from elsewhere" if not is_last or self._fallback else "it was the last source"
        logger.warning("cannot load more weights from %s: %s; %s", source.name, failure, consequence)
        if not is_last or self._streamed.is_complete:
            return
        if self._fallback is None:
            self._streamed.fail(failure)
            return
        fallback, self._fallback = self._fallback, None
        try:
            self.add(fallback())
        except Exception as error:
            self._streamed.fail(error)


Reason = Annotated[str, Meta(max_length=512)]
CHUNK_BYTES = 4 << 20
"""Largest chunk of a tensor: the unit in which a server limits its rate. Server and client must agree."""


class WeightsRequest(Message, frozen=True, tag=60):
    """Request for the manifest. It is answered by `WeightsReply` or `WeightsRefused`."""

    form: Name
    """Format in which the client holds weights: device type, dtype and quantization."""
    fingerprint: Name
    """Fingerprint of the client's copy of the checkpoint. It is empty without a copy."""


class PartRequest(Message, frozen=True, tag=61):
    """Request for one part. It is answered by `PartReply` or `WeightsRefused`. It withdraws the part requested before."""

    part: Count
    in_place: bool = False
    """Whether the client can map the server's device memory: it has opened `WeightsReply.memory`."""


class WeightsReply(Message, frozen=True, tag=70):
    manifest: Annotated[bytes, Meta(max_length=6 << 20)]
    """msgpack of `Manifest`."""
    memory: MemoryRegion | None = None
    """Device memory of some weights, by which a client learns whether it can map them. None if the server sends bytes only."""


class PartReply(Message, frozen=True, tag=71):
    part: Count
    handle: TransferHandle
    """Transfer of the part's chunks, which become ready at the server's rate. With `regions` it has one part without bytes for
    each tensor: the client may copy the tensor when that part is ready."""
    regions: Annotated[list[MemoryRegion], Meta(max_length=4096)] = msgspec.field(default_factory=list)
    """Device memory of the tensors, in order. Empty if the transfer has their bytes."""


class WeightsRefused(Message, frozen=True, tag=72):
    reason: Reason


FromWeightClient: TypeAlias = WeightsRequest | PartRequest | Goodbye
FromWeightServer: TypeAlias = WeightsReply | PartReply | WeightsRefused | Goodbye

TO_WEIGHT_SERVER: Codec[FromWeightClient] = Codec(FromWeightClient)
TO_WEIGHT_CLIENT: Codec[FromWeightServer] = Codec(FromWeightServer)

_DECODER = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """A manifest from which a model can be built. Raises MalformedMessage for any other manifest."""
    try:
        manifest = _DECODER.decode(data)
        manifest.check()
    except (msgspec.MsgspecError, ValueError, RecursionError, UnsupportedModel) as error:
        raise MalformedMessage(f"invalid manifest: {error}") from None
    return manifest


def chunk_ranges(tensors: Sequence[TensorForm]) -> list[tuple[int, int, int]]:
    """(tensor, start, end) of each chunk, in bytes. Tensors are divided separately, in order."""
    return [
        (i, start, min(start + CHUNK_BYTES, tensor.nbytes))
        for i, tensor in enumerate(tensors)
        for start in range(0, tensor.nbytes, CHUNK_BYTES)
    ]
