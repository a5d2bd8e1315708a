"""The prefix cache of a simulated worker: which blocks it holds, and the KV events that say so."""

from collections import OrderedDict
from collections.abc import Callable

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.planning.simulation.workers.prompt_blocks import PromptBlocks


class PrefixCache:
    """Least recently used blocks are evicted first, and of a chain the last ones.

    Sequences hold their tokens beside the cached blocks; a block in use is the most recently used, and is not pinned.
    """

    def __init__(self, capacity: int, block_tokens: int, publish: Callable[[CacheEvent], None]) -> None:
        """`capacity`: tokens of the KV cache."""
        self._capacity, self._block_tokens, self._publish = capacity, block_tokens, publish
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._used = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def cached(self, prompt: PromptBlocks) -> int:
        """Leading tokens of the prompt in the cache; they become the most recently used."""
        held, count = self._blocks, 0
        for key in prompt.chain:
            if key not in held:
                break
            count += 1
        for key in reversed(prompt.chain[:count]):
            held.move_to_end(key)
        return count * self._block_tokens

    def held(self, prompt: PromptBlocks) -> int:
        """As `cached`, without a change of the order of eviction."""
        count = 0
        for key in prompt.chain:
            if key not in self._blocks:
                break
            count += 1
        return count * self._block_tokens

    def clear(self) -> None:
        """All blocks and all sequences are gone."""
        self._blocks.clear()
        self._used = 0
        self._publish(CacheCleared())

    def tokens_of(self, prompt: PromptBlocks) -> int:
        """Tokens of the prompt in full blocks."""
        return len(prompt.chain) * self._block_tokens

    def reserve(self, tokens: int) -> None:
        """A sequence holds `tokens` outside the cached blocks; a negative number returns them."""
        self._used += tokens
        if tokens > 0:
            self._evict()

    def store(self, prompt: PromptBlocks) -> None:
        """The blocks of a computed prompt can now be found."""
        chain, held = prompt.chain, self._blocks
        start = 0
        while start < len(chain) and chain[start] in held:
            start += 1
        stop = start
        while stop < len(chain) and chain[stop] not in held:
            stop += 1
        if start < stop:
            parent = chain[start - 1] if start else None
            self._publish(BlocksStored(chain[start:stop], parent, prompt.part(start, stop)))
        for key in reversed(chain[:stop]):
            held[key] = None
            held.move_to_end(key)
        self._evict()

    def _evict(self) -> None:
        surplus = len(self._blocks) - max(0, self._capacity - self._used) // self._block_tokens
        if surplus > 0:
            self._publish(
                BlocksRemoved([self._blocks.popitem(last=False)[0] for _ in range(min(surplus, len(self._blocks)))])
            )
