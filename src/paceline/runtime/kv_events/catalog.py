"""What a cache holds by its own account, in order: enough to tell it all again to somebody who comes late."""

from collections.abc import Hashable, Iterator

from paceline.core.kv_events import TIERS, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, Tier


class KvCatalog:
    """Takes events, gives back those that lead to the same cache from an empty one."""

    def __init__(self) -> None:
        self._blocks: dict[Tier, dict[Hashable, BlocksStored]] = {tier: {} for tier in TIERS}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def apply(self, event: CacheEvent) -> None:
        match event:
            case BlocksStored():
                size, parent = event.block_size, event.parent
                for i, key in enumerate(event.keys):
                    tokens = event.tokens[i * size : (i + 1) * size]
                    block = BlocksStored((key,), parent, tokens, event.salt, event.tier, size)
                    self._blocks[event.tier].setdefault(key, block)
                    parent = key
            case BlocksRemoved():
                for key in event.keys:
                    self._blocks[event.tier].pop(key, None)
            case CacheCleared():
                for blocks in self._blocks.values():
                    blocks.clear()

    def events(self) -> Iterator[CacheEvent]:
        """A clearing, then every block after its parent. Blocks whose parent is in no tier cannot be hit, and are left out."""
        yield CacheCleared()
        told: set[Hashable] = set()
        following: dict[Hashable | None, list[BlocksStored]] = {}
        for blocks in self._blocks.values():
            for block in blocks.values():
                following.setdefault(block.parent, []).append(block)
        pending = list(reversed(following.get(None, ())))
        while pending:  # depth first: neighbours in a chain stay neighbours
            block = pending.pop()
            yield block
            if block.keys[0] not in told:
                told.add(block.keys[0])
                pending.extend(reversed(following.get(block.keys[0], ())))
