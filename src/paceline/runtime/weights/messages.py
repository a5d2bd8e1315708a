"""Messages between a worker that loads a model and a worker that has it. The weights themselves are transfers."""

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.core.errors import UnsupportedModel
from paceline.models.loading.weight_manifest import Manifest, TensorForm
from paceline.runtime.transfer.messages import MemoryRegion, TransferHandle
from paceline.runtime.wire.codec import Codec, MalformedMessage
from paceline.runtime.wire.messages import Count, Goodbye, Message, Name

Reason = Annotated[str, Meta(max_length=512)]
CHUNK_BYTES = 4 << 20
"""Largest chunk of a tensor: the unit in which a server limits its rate. Server and client must agree."""


class WeightsRequest(Message, frozen=True, tag=60):
    """Request for the manifest. Answered by `WeightsReply` or `WeightsRefused`."""

    form: Name
    """Format in which the client holds weights: device type, dtype and quantization."""
    fingerprint: Name
    """Fingerprint of the client's copy of the checkpoint. Empty without a copy."""


class PartRequest(Message, frozen=True, tag=61):
    """Request for one part. Answered by `PartReply` or `WeightsRefused`. It withdraws the part requested before."""

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
    except (msgspec.MsgspecError, ValueError, UnsupportedModel) as error:
        raise MalformedMessage(f"invalid manifest: {error}") from None
    return manifest


def chunk_ranges(tensors: Sequence[TensorForm]) -> list[tuple[int, int, int]]:
    """(tensor, start, end) of each chunk, in bytes. Tensors are divided separately, in order."""
    return [
        (i, start, min(start + CHUNK_BYTES, tensor.nbytes))
        for i, tensor in enumerate(tensors)
        for start in range(0, tensor.nbytes, CHUNK_BYTES)
    ]
