"""Handles and messages of the transfer protocol. A message is one frame; the bytes of a chunk may follow as a second frame."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.wire.codec import Codec

ID_BYTES = 16
MAX_PARTS = 1 << 16
MAX_PART_BYTES = 1 << 40

TransferId = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
PartBytes = Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
ChannelName = Annotated[str, Meta(max_length=16)]
Address = Annotated[str, Meta(max_length=256)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Slot = Annotated[int, Meta(ge=-1, lt=2**16)]
Checksum = Annotated[int, Meta(ge=0, lt=2**32)]


class TransferHandle(msgspec.Struct, array_like=True, frozen=True):
    """All that a client needs to fetch a transfer. It grants access, so keep it as secret as the data."""

    id: TransferId
    addresses: Annotated[dict[ChannelName, Address], Meta(min_length=1, max_length=8)]
    """Addresses of the server by channel. Clients ignore channels that they do not know."""
    sizes: Annotated[list[PartBytes], Meta(min_length=1, max_length=MAX_PARTS)]
    """Bytes of each part."""
    key: Annotated[str, Meta(max_length=40)] = ""
    """Public key of the server. It is empty without CURVE."""

    def __repr__(self) -> str:
        return f"TransferHandle({len(self.sizes)} parts, {sum(self.sizes)} bytes, {'/'.join(self.addresses)})"


class MemoryRegion(msgspec.Struct, array_like=True, frozen=True):
    """Device memory of a worker. Processes of the same machine can map it: keep it as secret as the data."""

    process: TransferId
    """Random id of the process that has the memory. It cannot map its own memory a second time."""
    handle: Annotated[bytes, Meta(max_length=64)]
    """Handle of the allocation, as the driver of the device gives it."""
    offset: PartBytes
    """First byte of the region in the allocation."""
    size: PartBytes


class ChunkRequest(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Request for one chunk. The server replies when the part is ready."""

    id: TransferId
    index: Index
    """Part of the transfer."""
    chunk: Index
    """Chunk of the part."""
    slot: Slot = -1
    """Destination of the bytes. For shared memory it is a slot of the client's segment. For NIXL it is 0, and the server picks
    a staging slot. For sockets it is -1, and the bytes follow the reply."""


class StagingRequest(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """First message of a NIXL channel: request for the location of the staging buffer."""


class SlotReleased(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The client has read this slot of the staging buffer."""

    slot: Index


class ChunkReply(msgspec.Struct, array_like=True, frozen=True, tag=65):
    """One chunk. Its bytes are in the frame that follows, in the requested slot of shared memory, or in the staging buffer."""

    index: Index
    chunk: Index
    checksum: Checksum
    slot: Slot = -1
    """Slot of the staging buffer. -1 on channels without a staging buffer."""


class KeepAlive(msgspec.Struct, array_like=True, frozen=True, tag=66):
    """The server is alive and the requested part is not ready yet."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=67):
    """The request fails. The client gives up the fetch."""

    reason: Annotated[str, Meta(max_length=512)]


class StagingReply(msgspec.Struct, array_like=True, frozen=True, tag=68):
    """Location of the staging buffer: NIXL metadata of the server and the buffer's address in its memory."""

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    slot: Index
    """Slot with the probe bytes. A client that can read them can read every slot."""


ToServer: TypeAlias = ChunkRequest | StagingRequest | SlotReleased
Reply: TypeAlias = ChunkReply | KeepAlive | StagingReply
ToClient: TypeAlias = Reply | Refused

TO_SERVER: Codec[ToServer] = Codec(ToServer)
TO_CLIENT: Codec[ToClient] = Codec(ToClient)
