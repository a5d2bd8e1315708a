"""The parts of a hand-off: blocks by segment and layer, and hidden states for a draft. The sender and the receiver derive them
alike."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.kv_blocks import layer_bytes
from paceline.models.runner import ModelRunner

SEGMENT_BYTES = 2 << 20
"""Bytes of a part. Smaller parts cost more in messages than they save in waiting."""
SEGMENT_BLOCKS = 8, 32
"""Least and most blocks of a part of `SEGMENT_BYTES`."""
IN_PLACE_BLOCKS = 512
"""Blocks of a part that is read in place, all layers at once: the copy takes less time than a message."""
NUMBER = struct.Struct("<i")
"""A block number in a part."""
MAX_PARTS = 8192


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Memory layout of keys, values and hidden states. Two workers can exchange blocks if their layouts are equal."""

    num_layers: int
    layer_bytes: int
    """Bytes of one block in one layer."""
    state_bytes: int
    """Bytes of one token's hidden state."""
    kv_dtype: str
    dtype: str
    weights: str = ""
    """Identity of the weights: see `ModelRunner.weights_id`."""

    @staticmethod
    def of(runner: ModelRunner) -> "CacheLayout":
        config, dtype = runner.model.config, runner.model.dtype
        return CacheLayout(
            num_layers=config.num_layers,
            layer_bytes=layer_bytes(runner),
            state_bytes=config.hidden_size * dtype.itemsize,
            kv_dtype=str(runner.cache[0][0].dtype),
            dtype=str(dtype),
            weights=runner.weights_id,
        )

    @property
    def name(self) -> str:
        """A string that is equal only for equal layouts."""
        return f"{self.num_layers}x{self.layer_bytes}/{self.kv_dtype}/{self.state_bytes}/{self.dtype}/{self.weights}"


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Keys and values of one layer, blocks `start` to `stop` of the sequence."""

    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class StatePart:
    """Hidden states of tokens `start` to `stop`: [layers, stop - start, D]."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class NumberPart:
    """Numbers that blocks `start` to `stop` of the sequence have in the cache of the source, which the destination reads."""

    start: int
    stop: int


Part = BlockPart | StatePart | NumberPart


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """Blocks `first` to `end` of a sequence, and the states of the last `state_rows` tokens in them after `state_layers`."""

    layout: CacheLayout
    first: int
    end: int
    state_layers: tuple[int, ...] = ()
    state_rows: int = 0
    in_place: bool = False
    """Whether the destination reads the blocks from the source's memory."""

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise ValueError(f"invalid block range: {self.first} to {self.end}")
        layers = set(self.state_layers)
        if len(layers) < len(self.state_layers) or not layers <= set(range(self.layout.num_layers + 1)):
            raise ValueError(
                f"invalid state layers {self.state_layers}: use distinct layers up to {self.layout.num_layers}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens up to the end of the last block."""
        return self.end * BLOCK_SIZE

    @property
    def first_state(self) -> int:
        """First token whose states are sent; `num_tokens` if none are."""
        rows = self.state_rows if self.state_layers else 0
        return max(self.first * BLOCK_SIZE, self.num_tokens - rows)

    def parts(self) -> list[Part]:
        """Parts in the order in which they become ready: by segment, then by layer; the states of a segment last."""
        parts: list[Part] = []
        step = self._segment_blocks
        for start in range(self.first, self.end, step):
            stop = min(start + step, self.end)
            if self.in_place:
                parts.append(NumberPart(start, stop))
            else:
                parts.extend(BlockPart(layer, start, stop) for layer in range(self.layout.num_layers))
            row = max(start * BLOCK_SIZE, self.first_state)
            if row < stop * BLOCK_SIZE:
                parts.append(StatePart(row, stop * BLOCK_SIZE))
        return parts

    def size(self, part: Part) -> int:
        """Bytes of a part."""
        if isinstance(part, NumberPart):
            return (part.stop - part.start) * NUMBER.size
        if isinstance(part, BlockPart):
            return (part.stop - part.start) * self.layout.layer_bytes
        return len(self.state_layers) * (part.stop - part.start) * self.layout.state_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks and states, also of those that are read in place."""
        blocks = (self.end - self.first) * self.layout.num_layers * self.layout.layer_bytes
        return blocks + len(self.state_layers) * (self.num_tokens - self.first_state) * self.layout.state_bytes

    @property
    def _segment_blocks(self) -> int:
        if self.in_place:
            per_segment, blocks = 2, IN_PLACE_BLOCKS
        else:
            least, most = SEGMENT_BLOCKS
            per_segment = self.layout.num_layers + 1
            blocks = min(most, max(least, -(-SEGMENT_BYTES // self.layout.layer_bytes)))
        return max(blocks, -(-(self.end - self.first) * per_segment // MAX_PARTS))


def pack_numbers(blocks: Sequence[int]) -> memoryview:
    """The bytes of a `NumberPart`."""
    return memoryview(b"".join(NUMBER.pack(block) for block in blocks))


def unpack_numbers(data: memoryview, num_blocks: int) -> list[int]:
    """The block numbers in a `NumberPart`. Raises ValueError for numbers that a cache of `num_blocks` blocks does not have."""
    numbers = [number for (number,) in NUMBER.iter_unpack(data)]
    if not all(0 <= number < num_blocks for number in numbers):
        raise ValueError(f"invalid block numbers for a cache of {num_blocks} blocks")
    return numbers
