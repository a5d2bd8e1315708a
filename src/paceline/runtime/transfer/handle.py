"""What a worker must be told to take a parcel: it travels inside messages."""

from typing import Annotated

import msgspec
from msgspec import Meta

ID_BYTES = 16
MAX_PARTS = 1 << 16
MAX_PART_BYTES = 1 << 40

Size = Annotated[int, Meta(ge=0, le=MAX_PART_BYTES)]
Kind = Annotated[str, Meta(max_length=16)]
Address = Annotated[str, Meta(max_length=256)]


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """Whoever has the ticket may take the parcel: it is as secret as what is inside."""

    id: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    addresses: Annotated[dict[Kind, Address], Meta(min_length=1, max_length=8)]
    """Where the depot is, by kind of transfer. Kinds that the taker does not know are left alone."""
    sizes: Annotated[list[Size], Meta(min_length=1, max_length=MAX_PARTS)]
    """Bytes of each part."""
    key: Annotated[str, Meta(max_length=40)] = ""
    """The public key that the depot must prove to own; empty without CURVE."""

    def __repr__(self) -> str:
        return f"Ticket({len(self.sizes)} parts, {sum(self.sizes)} bytes, {'/'.join(self.addresses)})"
