"""The blocks of a paged KV cache, and the block tables of sequences. Target and draft have separate instances.

`BlockPool` holds a fixed number of blocks, counted by reference. It keeps unreferenced blocks as a prefix cache until they are
needed. `BlockTables` holds the blocks of each sequence.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import block_key, chain_keys, root_key

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

    def clear(self) -> None:
        """No prefix hit finds a block any more: their contents were computed with other weights. All blocks are free."""
        assert self.num_free == self.num_blocks
        self._key_of.clear()
        self._block_of.clear()
        self.report(CacheCleared())

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


def blocks_for(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


@dataclass(slots=True)
class _Table:
    parent: bytes
    """Key of the last published block, or of the root."""
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    salt: str = ""


class BlockTables:
    """Opens, grows, rolls back and closes the block tables of sequences over one pool."""

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefix_caching = prefix_caching
        self._tables: dict[int, _Table] = {}
        self._keys: dict[int, list[bytes]] = {}
        """Block keys of sequences that wait: a step asks several times, and those of a long prompt take milliseconds."""

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._tables

    def __len__(self) -> int:
        return len(self._tables)

    def blocks(self, sequence_id: int) -> Sequence[int]:
        """A live view that only grows; a roll-back creates a new list."""
        return self._tables[sequence_id].blocks

    def capacity(self, sequence_id: int) -> int:
        """Tokens that the sequence's blocks can hold."""
        return len(self._tables[sequence_id].blocks) * BLOCK_SIZE

    def find(self, ids: Sequence[int], salt: str, sequence_id: int | None = None) -> tuple[list[int], list[bytes]]:
        """Blocks and keys of the longest cached prefix of `ids`, leaving at least its last token to compute. With the
        sequence that has these tokens, its keys are remembered until it is opened or closed."""
        if not self.prefix_caching:
            return [], []
        keys = None if sequence_id is None else self._keys.get(sequence_id)
        if keys is None or len(keys) != (len(ids) - 1) // BLOCK_SIZE:
            keys = chain_keys(ids[: len(ids) - 1], salt)
            if sequence_id is not None:
                self._keys[sequence_id] = keys
        blocks = self.pool.find(keys)
        return blocks, keys[: len(blocks)]

    def open(self, sequence_id: int, ids: Sequence[int], salt: str) -> int:
        """Start a table on the longest cached prefix; returns how many tokens that is."""
        blocks, keys = self.find(ids, salt, sequence_id)
        self._keys.pop(sequence_id, None)
        self.pool.hold(blocks)
        parent = keys[-1] if keys else root_key(salt)
        self._tables[sequence_id] = _Table(parent, blocks, len(blocks), salt)
        return len(blocks) * BLOCK_SIZE

    def grow(self, sequence_id: int, num_tokens: int) -> bool:
        """Grow the table to `num_tokens` in all. Returns False, and changes nothing, if the pool has too few blocks."""
        table = self._tables[sequence_id]
        missing = blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        table.blocks.extend(self.pool.take(missing))
        return True

    def shrink(self, sequence_id: int, num_tokens: int) -> None:
        """Roll back: release the blocks past `num_tokens`."""
        table = self._tables[sequence_id]
        keep = max(blocks_for(num_tokens), table.num_published)
        if keep < len(table.blocks):
            self.pool.release(table.blocks[keep:])
            table.blocks = table.blocks[:keep]

    def publish(self, sequence_id: int, ids: Sequence[int], num_computed: int) -> None:
        """Add every block that is full of committed *and* computed tokens to the prefix cache."""
        if not self.prefix_caching:
            return
        table = self._tables[sequence_id]
        while (end := (table.num_published + 1) * BLOCK_SIZE) <= num_computed:
            tokens = ids[end - BLOCK_SIZE : end]
            parent, table.parent = table.parent, block_key(table.parent, tokens)
            is_new = self.pool.publish(table.blocks[table.num_published], table.parent)
            if is_new and self.pool.is_watched:
                above = parent if table.num_published else None
                self.pool.report(BlocksStored((table.parent,), above, tuple(tokens), table.salt, block_size=BLOCK_SIZE))
            table.num_published += 1

    def fork(self, source_id: int, sequence_id: int, num_tokens: int) -> tuple[range, range] | None:
        """Open a table on the first `num_tokens` of another: full blocks are shared, a partly filled one is copied.

        Returns the slots to copy from and to; None, without a change, if no block is free. The source may only append while
        it has forks, and only committed blocks are published, so neither sequence writes where the other reads.
        """
        source = self._tables[source_id]
        num_full, rest = divmod(num_tokens, BLOCK_SIZE)
        assert source.num_published <= num_full, "a fork begins after the published blocks"
        shared = source.blocks[:num_full]
        blocks, sources, targets = list(shared), range(0), range(0)
        if rest:
            copy = self.pool.allocate()
            if copy is None:
                return None
            first, copied = source.blocks[num_full] * BLOCK_SIZE, copy * BLOCK_SIZE
            blocks.append(copy)
            sources, targets = range(first, first + rest), range(copied, copied + rest)
        self.pool.hold(shared)
        self._tables[sequence_id] = _Table(source.parent, blocks, source.num_published, source.salt)
        return sources, targets

    def replace(self, sequence_id: int, other_id: int) -> None:
        """Give the sequence the table of another in place of its own; the other is closed."""
        self.close(sequence_id)
        self._tables[sequence_id] = self._tables.pop(other_id)

    def close(self, sequence_id: int) -> None:
        """Release all blocks of the sequence. Closing a closed sequence is not an error."""
        self._keys.pop(sequence_id, None)
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self.pool.release(table.blocks)
