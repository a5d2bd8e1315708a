"""Block tables that can be forked: how a guess at the future shares the cache of the text it continues."""

from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables, _Table


class ForkingTables(BlockTables):
    """A fork holds its parent's full blocks and a copy of the last one if that is partly filled.

    Neither may then write where the other reads: the parent only appends while it has forks, and a fork owns whatever it
    appends to. Blocks are published by committed length, so a fork never has to take back what it announced.
    """

    def fork(self, source_id: int, sequence_id: int, num_tokens: int) -> tuple[range, range] | None:
        """(slots to copy from, slots to copy to) for `num_tokens` of the source; None, and nothing changes, without room."""
        source = self._tables[source_id]
        full, rest = divmod(num_tokens, BLOCK_SIZE)
        assert source.num_published <= full, "a fork starts at or after the committed tokens"
        shared = source.blocks[:full]
        blocks, sources, targets = list(shared), range(0), range(0)
        if rest:
            copy = self.pool.allocate()
            if copy is None:
                return None
            first, copied = source.blocks[full] * BLOCK_SIZE, copy * BLOCK_SIZE
            blocks.append(copy)
            sources, targets = range(first, first + rest), range(copied, copied + rest)
        self.pool.hold(shared)
        self._tables[sequence_id] = _Table(source.parent, blocks, source.num_published)
        return sources, targets
