"""The host tier: which block each slot holds, and blocks that are being fetched into it."""

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.kv.tiers.block import TieredBlock
from paceline.kv.tiers.eviction import EvictionIndex


class HostTier:
    """A slot is empty, *taken* (being filled), or holds a block. A block is *backed* if it is on disk too: backed blocks are
    evicted first, from any place in their chain. Not thread-safe."""

    def __init__(self, num_slots: int) -> None:
        self._index = EvictionIndex()
        self._slots: dict[bytes, int] = {}
        self._empty = list(range(num_slots))
        self._backed: OrderedDict[bytes, None] = OrderedDict()  # next to evict first

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    @property
    def blocks(self) -> list[TieredBlock]:
        return list(self._index)

    def take(self, spared: Container[bytes] = ()) -> tuple[int | None, bytes | None]:
        """A slot to fill and the key of the block evicted from it. Blocks in `spared` are evicted last. No slot if every one is
        taken or leased."""
        if self._empty:
            return self._empty.pop(), None
        key = next((key for key in self._backed if not self._index.is_leased(key)), None) or self._index.oldest(spared)
        if key is None:
            return None, None
        self._index.remove(key)
        self._backed.pop(key, None)
        return self._slots.pop(key), key

    def give_back(self, slot: int) -> None:
        """Return a taken slot that was not filled."""
        self._empty.append(slot)

    def add(self, block: TieredBlock, slot: int) -> bool:
        """Record the block of a filled slot. Returns False, and frees the slot, if the tier already has the block."""
        if block.key in self._index:
            self._empty.append(slot)
            return False
        self._index.add(block)
        self._slots[block.key] = slot
        return True

    def get(self, key: bytes) -> tuple[TieredBlock, int]:
        return self._index.block(key), self._slots[key]

    def run(self, keys: Sequence[bytes]) -> list[bytes]:
        """The longest prefix of `keys` that this tier has."""
        count = next((i for i, key in enumerate(keys) if key not in self._index), len(keys))
        return list(keys[:count])

    def use(self, key: bytes) -> None:
        self._index.use(key)
        if key in self._backed:
            self._backed.move_to_end(key)

    def back(self, key: bytes) -> None:
        """Mark the block as stored on disk; no error if this tier does not have it."""
        if key in self._index:
            self._backed[key] = None

    def unback(self, key: bytes) -> None:
        """Mark the block as no longer stored on disk."""
        self._backed.pop(key, None)

    def lease(self, key: bytes) -> None:
        """Keep the block until `release`; leases are counted."""
        self._index.lease(key)

    def release(self, key: bytes) -> None:
        self._index.release(key)


class SlotMemory(Protocol):
    """Memory for `num_slots` blocks; see `models/host_blocks.py`."""

    @property
    def num_slots(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def view(self, slot: int) -> memoryview: ...

    def wait(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False)
class Fetch:
    """Blocks to bring into host memory. They stay there until `TierStore.finish`."""

    keys: Sequence[bytes]
    """Keys of one chain, in order. If one block is missing, the fetch ends before it."""
    leased: list[bytes] = field(default_factory=list)
    from_disk: set[bytes] = field(default_factory=set)
    is_done: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class TierTraffic:
    """Counts since the start."""

    disk_read: int = 0
    disk_written: int = 0
    """Bytes."""
    bad: int = 0
    """Blocks on disk that failed a check; they are computed again."""
    dropped: int = 0
    """Blocks not stored: all slots were in use, or the disk failed."""
