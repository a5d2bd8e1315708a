"""A prompt as the router sees it: a length and numbers of its blocks, without tokens."""

from collections.abc import Sequence
from typing import overload

from paceline.planning.traces.trace import BLOCK_TOKENS, TraceRequest

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
