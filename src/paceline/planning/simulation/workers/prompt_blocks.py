"""A prompt as the router sees it: a length and numbers of its blocks, without tokens."""

from collections.abc import Sequence
from typing import overload

from paceline.cluster.routing.prefix_tree import KEY_MASK
from paceline.planning.traces.trace import BLOCK_TOKENS, TraceRequest

_COPY_BITS = 40
"""Bits of a block's number that hold its id in the trace; the copy is above them."""


class PromptBlocks(Sequence[int]):
    """Stands for the token ids of a prompt, or of consecutive blocks of it.

    One id stands for `block_tokens / 16` tokens, so that a block of the trace is a block of the router's index. Rates that the
    router learns are then seconds per id, and its decisions are those for tokens.
    """

    __slots__ = ("_base", "_length", "chain")

    def __init__(self, chain: tuple[int, ...], length: int, base: int = 0) -> None:
        self.chain = chain
        """Numbers of the prefixes that end with each block."""
        self._length = length
        self._base = base
        """Number of the prefix before the first block."""

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        raise TypeError("a simulated prompt has no token ids")

    def part(self, start: int, stop: int) -> "PromptBlocks":
        """Blocks `start` to `stop`, as a worker announces them."""
        base = self.chain[start - 1] if start else 0
        return PromptBlocks(self.chain[start:stop], (stop - start) * BLOCK_TOKENS, base)

    def sums(self) -> Sequence[int]:
        base = self._base
        return [(number - base) & KEY_MASK for number in self.chain] if base else self.chain


NO_PROMPT = PromptBlocks((), 0)


def prefix_sums(ids: Sequence[int], first_block: int) -> Sequence[int]:
    """The function that `KvIndex` needs, for simulated prompts."""
    if not isinstance(ids, PromptBlocks):
        raise TypeError("a simulated index takes simulated prompts")
    return ids.sums()


def prompt_blocks(request: TraceRequest, block_tokens: int) -> PromptBlocks:
    offset = (request.copy << _COPY_BITS) + 1  # no block has the number 0
    return PromptBlocks(
        tuple([block + offset for block in request.blocks]), request.prompt_tokens * BLOCK_TOKENS // block_tokens
    )
