"""What is known of a cached block besides its contents."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.core.kv_events import BlocksStored, Tier
from paceline.kernels.layout import BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class TieredBlock:
    """A full block of committed tokens. Its key covers the tenant's salt, so in every tier a block is found by who may see it
    and by nobody else."""

    key: bytes
    parent: bytes | None
    """Key of the block before it; None at the beginning of a sequence."""
    tokens: bytes
    """int32, `BLOCK_SIZE` of them."""
    salt: str = ""

    @classmethod
    def of(cls, event: BlocksStored) -> "TieredBlock":
        """Of an event about one block."""
        (key,) = event.keys
        assert isinstance(key, bytes)
        assert event.parent is None or isinstance(event.parent, bytes)
        return cls(key, event.parent, array("i", event.tokens).tobytes(), event.salt)

    def stored(self, tier: Tier) -> BlocksStored:
        return BlocksStored((self.key,), self.parent, tuple(array("i", self.tokens)), self.salt, tier, BLOCK_SIZE)


def parents_first(blocks: Iterable[TieredBlock]) -> Iterator[TieredBlock]:
    """Every block after the one before it; those whose beginning is not there are left out, for nothing can hit them."""
    following: dict[bytes | None, list[TieredBlock]] = {}
    for block in blocks:
        following.setdefault(block.parent, []).append(block)
    pending = following.get(None, [])[::-1]
    while pending:
        block = pending.pop()
        yield block
        pending.extend(reversed(following.get(block.key, ())))
