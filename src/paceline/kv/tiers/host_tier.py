"""The books of the host tier: which block is in which slot of its memory."""

from collections import OrderedDict
from collections.abc import Container, Sequence

from paceline.kv.tiers.block import TieredBlock
from paceline.kv.tiers.shelf import Shelf


class HostTier:
    """Slots are empty, *taken* (somebody is filling one), or hold a block. A block is *backed* if it is on disk too: those go
    first, from any place in their chain. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._shelf = Shelf()
        self._slots: dict[bytes, int] = {}
        self._empty = list(range(num_slots))
        self._backed: OrderedDict[bytes, None] = OrderedDict()  # next to go first

    def __len__(self) -> int:
        return len(self._shelf)

    def __contains__(self, key: object) -> bool:
        return key in self._shelf

    @property
    def blocks(self) -> list[TieredBlock]:
        return list(self._shelf)

    def take(self, spared: Container[bytes] = ()) -> tuple[int | None, bytes | None]:
        """A slot to fill, and the key of whom it was taken from, one of `spared` only if need be; no slot if every one is
        taken or leased."""
        if self._empty:
            return self._empty.pop(), None
        key = next((key for key in self._backed if not self._shelf.is_leased(key)), None) or self._shelf.oldest(spared)
        if key is None:
            return None, None
        self._shelf.remove(key)
        self._backed.pop(key, None)
        return self._slots.pop(key), key

    def give_back(self, slot: int) -> None:
        """It was not filled after all."""
        self._empty.append(slot)

    def add(self, block: TieredBlock, slot: int) -> bool:
        """A taken slot is filled. False, and it is empty again, if the block is here already."""
        if block.key in self._shelf:
            self._empty.append(slot)
            return False
        self._shelf.add(block)
        self._slots[block.key] = slot
        return True

    def get(self, key: bytes) -> tuple[TieredBlock, int]:
        return self._shelf.block(key), self._slots[key]

    def run(self, keys: Sequence[bytes]) -> list[bytes]:
        """The longest run of `keys` that is here, from the first on."""
        count = next((i for i, key in enumerate(keys) if key not in self._shelf), len(keys))
        return list(keys[:count])

    def use(self, key: bytes) -> None:
        self._shelf.use(key)
        if key in self._backed:
            self._backed.move_to_end(key)

    def back(self, key: bytes) -> None:
        """It is on disk; no error if it is not here."""
        if key in self._shelf:
            self._backed[key] = None

    def unback(self, key: bytes) -> None:
        """It no longer is."""
        self._backed.pop(key, None)

    def lease(self, key: bytes) -> None:
        """It stays until `release`, which must come as often."""
        self._shelf.lease(key)

    def release(self, key: bytes) -> None:
        self._shelf.release(key)
