"""Metadata of a cached block."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.core.kv_events import BlocksStored, Tier
from paceline.kernels.layout import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class TieredBlock:
    """A full block of committed tokens. The key includes the tenant's salt, so only that tenant can find the block, in every
    tier."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None for the first block of a sequence."""
    tokens: bytes
    """`BLOCK_SIZE` token ids as int32."""
    salt: str = ""

    @classmethod
    def of(cls, event: BlocksStored) -> "TieredBlock":
        """The block of an event about one block."""
        (key,) = event.keys
        assert isinstance(key, bytes)
        assert event.parent is None or isinstance(event.parent, bytes)
        return cls(key, event.parent, array("i", event.tokens).tobytes(), event.salt)

    def stored(self, tier: Tier) -> BlocksStored:
        return BlocksStored((self.key,), self.parent, tuple(array("i", self.tokens)), self.salt, tier, BLOCK_SIZE)


def parents_first(blocks: Iterable[TieredBlock]) -> Iterator[TieredBlock]:
    """The blocks, each after its parent. A block whose chain is incomplete is left out, because no prefix can hit it."""
    following: dict[bytes | None, list[TieredBlock]] = {}
    for block in blocks:
        following.setdefault(block.parent, []).append(block)
    pending = following.get(None, [])[::-1]
    while pending:
        block = pending.pop()
        yield block
        pending.extend(reversed(following.get(block.key, ())))
