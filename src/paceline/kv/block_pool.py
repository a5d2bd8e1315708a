"""A fixed number of cache blocks, counted by reference, the unreferenced ones kept as a prefix cache until needed."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from paceline.core.kv_events import BlocksRemoved, CacheEvent

Evicted = Callable[[Sequence[tuple[int, bytes]]], None]
"""Receives (block, key) pairs."""


class BlockPool:
    """Hands out block numbers. A block is *held* while any sequence refers to it, otherwise *free*.

    Free blocks with a key still serve prefix hits. They are evicted least recently used first, and within one sequence
    from its tail, since a chain without its head is useless.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to evict first
        self._listener: Callable[[CacheEvent], None] | None = None
        self._before_eviction: Evicted | None = None

    def listen(self, listener: Callable[[CacheEvent], None], before_eviction: Evicted | None = None) -> None:
        """Report every block that prefix hits find from now on, and no longer, to `listener`. `before_eviction` receives the
        blocks and keys that are about to be overwritten. The two callbacks run on the engine's thread and must not block."""
        self._listener, self._before_eviction = listener, before_eviction

    @property
    def is_watched(self) -> bool:
        return self._listener is not None

    def report(self, event: CacheEvent) -> None:
        """Pass an event to the listener, if there is one."""
        if self._listener is not None:
            self._listener(event)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks, held or free, that a prefix hit can find."""
        return len(self._block_of)

    def allocate(self) -> int | None:
        """A block to write to, or None when every block is held. Takes over the oldest cached one if it must."""
        return self.take(1)[0] if self._free else None

    def take(self, count: int) -> list[int]:
        """`count` blocks to write to. At least as many must be free."""
        blocks, evicted = [], []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
                evicted.append((block, key))
            self._references[block] = 1
            blocks.append(block)
        if evicted and self._before_eviction is not None:
            self._before_eviction(evicted)
        for _, key in evicted:
            self.report(BlocksRemoved((key,)))
        return blocks

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `keys`. They are not held yet: see `hold`."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: bytes) -> int | None:
        """The block of a key, held or free; None if there is none."""
        return self._block_of.get(key)

    def hold(self, blocks: Sequence[int]) -> None:
        """Refer to blocks that `find` returned."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`, given in chain order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._key_of:  # nothing to remember: reuse it before any cached block
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, key: bytes) -> bool:
        """`block` holds the committed tokens of `key`. The first block of a key wins; returns whether this is it."""
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        return True

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` are free, and would no longer be after `hold`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def check(self) -> None:
        """Raise if references, free list and keys disagree. Cheap enough to run whenever the engine is idle."""
        free = {block for block, count in enumerate(self._references) if count == 0}
        if free != set(self._free) or any(count < 0 for count in self._references):
            raise AssertionError(f"block references and free list disagree: {sorted(free ^ set(self._free))}")
        if {block: key for key, block in self._block_of.items()} != self._key_of:
            raise AssertionError("prefix-cache keys and blocks disagree")
