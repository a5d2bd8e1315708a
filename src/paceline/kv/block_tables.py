"""The block tables of sequences. Target and draft have separate instances."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.kv_events import BlocksStored
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_pool import BlockPool
from paceline.kv.prefix import block_key, chain_keys, root_key


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
