"""What couriers and depots say to each other. A message is one frame; the bytes of a piece may follow as a second one."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from paceline.runtime.transfer.handle import ID_BYTES
from paceline.runtime.wire.codec import Codec

Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Index = Annotated[int, Meta(ge=0, lt=2**31)]
Slot = Annotated[int, Meta(ge=-1, lt=2**16)]
Sum = Annotated[int, Meta(ge=0, lt=2**32)]


class Want(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """A piece, when its part is ready."""

    id: Id
    index: Index
    piece: Index
    slot: Slot = -1
    """Where in the taker's window it goes. Of one that has none, 0: it will read the piece from the giver's shelf; -1: it comes
    along with the answer."""


class Meet(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Before the first want by NIXL: where is your shelf?"""


class Taken(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The piece in this slot of the shelf has been read."""

    slot: Index


class Piece(msgspec.Struct, array_like=True, frozen=True, tag=65):
    """Here it is: in the frame behind this one, in the slot of the window, or on the shelf."""

    index: Index
    piece: Index
    checksum: Sum
    slot: Slot = -1
    """On the shelf; -1: not there."""


class Patience(msgspec.Struct, array_like=True, frozen=True, tag=66):
    """Still here: what you wait for is not ready yet."""


class Refused(msgspec.Struct, array_like=True, frozen=True, tag=67):
    """There is nothing, or nothing more, to be had."""

    reason: Annotated[str, Meta(max_length=512)]


class Met(msgspec.Struct, array_like=True, frozen=True, tag=68):
    """The shelf: how NIXL reaches it, and where it begins in the giver's memory."""

    metadata: Annotated[bytes, Meta(max_length=1 << 16)]
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    slot: Index
    """Where a greeting lies: who can read it can read the rest."""


ToDepot: TypeAlias = Want | Meet | Taken
Answer: TypeAlias = Piece | Patience | Met
ToCourier: TypeAlias = Answer | Refused

TO_DEPOT: Codec[ToDepot] = Codec(ToDepot)
TO_COURIER: Codec[ToCourier] = Codec(ToCourier)
