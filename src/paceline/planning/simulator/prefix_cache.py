"""The prefix cache of a simulated worker: which blocks it holds, and the KV events that say so.

`PromptBlocks` is a prompt as the router sees it: a length and numbers of its blocks, without tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import overload

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from paceline.planning.traces import BLOCK_TOKENS, TraceRequest

_COPY_STRIDE = 0x9E3779B97F
"""Distance between the numbers of a block in two copies, above all ids of a trace: 2^40 over the golden ratio. A dictionary
places a number by its low bits, and with a power of two those of all copies would be the same."""


class PromptBlocks(Sequence[int]):
    """Stands for the token ids of a prompt, or of consecutive blocks of it.

    One id stands for `block_tokens / 16` tokens, so that a block of the trace is a block of the router's index. Rates that the
    router learns are then seconds per id, and its decisions are those for tokens.
    """

    __slots__ = ("_length", "chain")

    def __init__(self, chain: tuple[int, ...], length: int) -> None:
        self.chain = chain
        """Numbers of the prefixes that end with each block."""
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        raise TypeError("a simulated prompt has no token ids")


NO_PROMPT = PromptBlocks((), 0)


def prefix_sums(ids: Sequence[int], first_block: int, before: int) -> Sequence[int]:
    """The function that `KvIndex` needs, for simulated prompts: their numbers stand for the whole prefix already."""
    if not isinstance(ids, PromptBlocks):
        raise TypeError("a simulated index takes simulated prompts")
    return ids.chain


def prompt_blocks(request: TraceRequest, block_tokens: int) -> PromptBlocks:
    offset = request.copy * _COPY_STRIDE + 1  # no block has the number 0
    return PromptBlocks(
        tuple([block + offset for block in request.blocks]), request.prompt_tokens * BLOCK_TOKENS // block_tokens
    )


class _Run:
    """Consecutive blocks of one chain that were last used together."""

    __slots__ = ("children", "keys", "parent")

    def __init__(self, keys: list[int], parent: "_Run | None") -> None:
        self.keys, self.parent = keys, parent
        self.children: dict[int, _Run] = {}
        """The runs that follow, by their first block."""


class PrefixCache:
    """Least recently used blocks are evicted first, and of a chain the last ones. So it holds every block before one that it
    holds, and the least recently used run has no children.

    Sequences hold their tokens in addition to the cached blocks. A block in use is the most recently used, and is not pinned.
    """

    def __init__(self, capacity: int, block_tokens: int, publish: Callable[[CacheEvent], None]) -> None:
        """`capacity` is the number of tokens of the KV cache."""
        self._capacity, self._block_tokens, self._publish = capacity, block_tokens, publish
        self._root = _Run([], None)
        self._recent: OrderedDict[_Run, None] = OrderedDict()
        """Least recently used first; of runs that were used together, the one with the earlier blocks last."""
        self._num_blocks = 0
        self._used = 0

    def __len__(self) -> int:
        return self._num_blocks

    def cached(self, prompt: PromptBlocks) -> int:
        """Leading tokens of the prompt in the cache; they become the most recently used."""
        _, count = self._use(prompt.chain)
        return count * self._block_tokens

    def held(self, prompt: PromptBlocks) -> int:
        """Returns the same as `cached`, without a change of the order of eviction."""
        chain, count, run = prompt.chain, 0, self._root
        while count < len(chain) and (child := run.children.get(chain[count])) is not None:
            common = _num_common(child.keys, chain, count)
            count += common
            if common < len(child.keys):
                break
            run = child
        return count * self._block_tokens

    def clear(self) -> None:
        """All blocks and all sequences are gone."""
        self._root.children.clear()
        self._recent.clear()
        self._used = self._num_blocks = 0
        self._publish(CacheCleared())

    def tokens_of(self, prompt: PromptBlocks) -> int:
        """Tokens of the prompt in full blocks."""
        return len(prompt.chain) * self._block_tokens

    def reserve(self, tokens: int) -> None:
        """A sequence holds `tokens` outside the cached blocks; a negative number returns them."""
        self._used += tokens
        if tokens > 0 and self._num_blocks > (self._capacity - self._used) // self._block_tokens:
            self._evict()

    def store(self, prompt: PromptBlocks) -> None:
        """The blocks of a computed prompt can now be found."""
        chain = prompt.chain
        last, start = self._use(chain)
        stop = len(chain)
        if start < stop:
            new, parent = chain[start:], chain[start - 1] if start else None
            self._publish(BlocksStored(new, parent, PromptBlocks(new, len(new) * BLOCK_TOKENS)))
            self._num_blocks += stop - start
            if start and not last.children:
                last.keys += new
            else:
                run = last.children[new[0]] = _Run(list(new), last)
                self._recent[run] = None
                self._touch(last)
        if self._num_blocks > (self._capacity - self._used) // self._block_tokens:
            self._evict()

    def _use(self, chain: tuple[int, ...]) -> tuple[_Run, int]:
        """The run of the last cached block of the chain and the number of these blocks, which become the most recently used."""
        run, count, length = self._root, 0, len(chain)
        while count < length and (child := run.children.get(chain[count])) is not None:
            keys = child.keys
            end = count + len(keys)
            if end > length or keys[-1] != chain[end - 1]:
                common = _num_common(keys, chain, count)
                count += common
                run = _split(child, common)
                break
            run, count = child, end
        self._touch(run)
        return run, count

    def _touch(self, run: _Run) -> None:
        """The run and those before it become the most recently used."""
        parent = run.parent
        if parent is None:
            return
        recent, move = self._recent, self._recent.move_to_end
        while parent is not None:
            try:
                move(run)
            except KeyError:  # a new one
                recent[run] = None
            run, parent = parent, parent.parent

    def _evict(self) -> None:
        """Evict the blocks for which the tokens of sequences leave no place."""
        surplus = self._num_blocks - max(0, self._capacity - self._used) // self._block_tokens
        if not self._num_blocks:
            return
        removed: list[int] = []
        recent, surplus = self._recent, min(surplus, self._num_blocks)
        self._num_blocks -= surplus
        while surplus:
            run = next(iter(recent))
            keys = run.keys
            if len(keys) > surplus:
                removed += keys[: -surplus - 1 : -1]
                del keys[-surplus:]
                break
            removed += reversed(keys)
            surplus -= len(keys)
            del recent[run]
            assert run.parent is not None
            del run.parent.children[keys[0]]
        self._publish(BlocksRemoved(removed))


def _num_common(keys: list[int], chain: tuple[int, ...], start: int) -> int:
    """Blocks that a run has in common with a chain from `start` on, of which the first is one. A number stands for the whole
    prefix, so bisection finds the last."""
    low, high = 1, min(len(keys), len(chain) - start)
    if keys[high - 1] == chain[start + high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == chain[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _split(run: _Run, at: int) -> _Run:
    """Divide a run; returns the first part, a new run that was not used yet."""
    keys, parent = run.keys, run.parent
    assert parent is not None
    first = parent.children[keys[0]] = _Run(keys[:at], parent)
    run.keys, run.parent = keys[at:], first
    first.children[run.keys[0]] = run
    return first
