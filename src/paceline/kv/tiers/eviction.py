"""The order of eviction in one tier: the least recently used chain first, from its tail."""

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass

from paceline.kv.tiers.block import TieredBlock


@dataclass(slots=True)
class _Entry:
    block: TieredBlock
    used: int
    children: int = 0
    leases: int = 0


class EvictionIndex:
    """The blocks of one tier. Only a *leaf*, a block without a child here, can be evicted, because a chain without its head is
    useless. Leased blocks stay. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._leaves: OrderedDict[bytes, None] = OrderedDict()  # next to evict first
        self._children: dict[bytes, int] = {}
        """Number of children of parents that are not here; a parent may be added later."""
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[TieredBlock]:
        return (entry.block for entry in self._entries.values())

    def block(self, key: bytes) -> TieredBlock:
        return self._entries[key].block

    def add(self, block: TieredBlock) -> None:
        """Add a block as the most recently used."""
        assert block.key not in self._entries
        entry = _Entry(block, self._tick(), self._children.pop(block.key, 0))
        self._entries[block.key] = entry
        if not entry.children:
            self._leaves[block.key] = None
        if block.parent is not None:
            parent = self._entries.get(block.parent)
            if parent is None:
                self._children[block.parent] = self._children.get(block.parent, 0) + 1
            else:
                parent.children += 1
                self._leaves.pop(block.parent, None)

    def use(self, key: bytes) -> None:
        """Mark the block as the most recently used."""
        self._entries[key].used = self._tick()
        if key in self._leaves:
            self._leaves.move_to_end(key)

    def lease(self, key: bytes) -> None:
        self._entries[key].leases += 1

    def release(self, key: bytes) -> None:
        entry = self._entries[key]
        assert entry.leases > 0
        entry.leases -= 1

    def is_leased(self, key: bytes) -> bool:
        return self._entries[key].leases > 0

    def oldest(self, spared: Container[bytes] = ()) -> bytes | None:
        """The key to evict next; one of `spared` only if there is no other. None if all leaves are leased."""
        last_resort = None
        for key in self._leaves:
            if self._entries[key].leases:
                continue
            if key not in spared:
                return key
            last_resort = last_resort or key
        return last_resort

    def remove(self, key: bytes) -> TieredBlock:
        """Remove the block. Its children here are unreachable until it is added again."""
        entry = self._entries.pop(key)
        self._leaves.pop(key, None)
        if entry.children:
            self._children[key] = entry.children
        if entry.block.parent is not None:
            self._orphan(entry.block.parent, entry.used)
        return entry.block

    def _orphan(self, parent: bytes, used: int) -> None:
        """`parent` lost a child that was last used at `used`."""
        above = self._entries.get(parent)
        if above is None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
            return
        above.children -= 1
        if not above.children:
            self._leaves[parent] = None
            if above.used <= used:  # as old as its evicted child: it is evicted next
                self._leaves.move_to_end(parent, last=False)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
