"""Layout of one forward pass: where its rows are in the paged cache, and what each row attends to.

`gpu_model` is the GPU that kernels are launched on. Tensors on the device `meta` have no memory: there, launches only choose
which kernels a GPU needs, and nothing is computed. `compile_for` names that GPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

AfterLayer = Callable[[int], None]
"""Called with a layer's number once its keys and values are stored; on a GPU, once that work is in the stream."""
MAX_TREE_ROWS = 64
"""Most rows of a token tree: one bit each in `ancestors`."""


LONG_ROWS = 2048
"""Rows of a sequence in one pass above which it is a `LongPrompt`. Captured passes have no more rows."""


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """A sequence that has many rows in a pass: a prompt, or a chunk of it."""

    sequence: int
    first_row: int
    num_rows: int
    context_len: int


@dataclass(frozen=True, slots=True)
class PassSize:
    """Size of a pass, padding included."""

    rows: int
    sequences: int
    rows_each: int
    """Number of rows of every sequence. If it equals `rows`, each sequence may have any number of rows."""
    few_rows: int = 1
    """Rows of each sequence that decodes in a pass with prompts."""
    num_decoding: int = 0
    """Number of sequences that decode, if they are the first ones and have `few_rows` rows each, and every prompt has more. 0
    if it is unknown."""
    is_tree: bool = False
    """Whether sequences may have trees."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayout:
    """Sequence `s` has rows `starts[s]:starts[s+1]` of the pass.

    Row `i` of a sequence stores its keys and values at logical index `context_lens[s] + i`, which `block_tables[s]` maps to a
    block; `slots` has the same as flat indices. A row attends to the whole context, to itself, and to its ancestors among the
    earlier rows of its sequence. In a chain these are all earlier rows. In a tree `ancestors` lists them, and rotary positions
    differ from logical indices.
    """

    slots: "Tensor"  # [T] int64, block * BLOCK_SIZE + offset
    starts: "Tensor"  # [S + 1] int32
    context_lens: "Tensor"  # [S] int32, tokens cached before this pass
    block_tables: "Tensor"  # [S, max_blocks] int32, unused entries 0
    # [T] int64 bitmask over the rows of the sequence. -1 stands for all earlier rows. None if all sequences are chains.
    ancestors: "Tensor | None" = None
    long_prompts: tuple[LongPrompt, ...] = ()
    """Sequences with more than `LONG_ROWS` rows, as the host knows them."""


@dataclass(frozen=True, slots=True)
class PassRows:
    """The rows of a pass on the host, for native calls that take no tensors. `AttentionLayout` describes the fields."""

    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[int]
    """The tables of all sequences, one after another, with `max_blocks` entries each."""
    max_blocks: int
    ancestors: Sequence[int]
    """The bitmasks of `AttentionLayout`. It is empty if all sequences are chains."""
    logit_rows: Sequence[int]


META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class GpuModel:
    """What the choice of kernels depends on."""

    name: str
    capability: int
    """Compute capability, such as 90 for Hopper."""
    multiprocessors: int
    memory_bytes: int


_meta: GpuModel | None = None


def compile_for(gpu: GpuModel) -> None:
    """Make `meta` stand for this GPU. Call it before any kernel is imported."""
    global _meta
    _meta = gpu


def gpu_model(device: torch.device) -> GpuModel | None:
    """The GPU behind `device`; None for a CPU."""
    if device.type == "meta":
        return _meta
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return GpuModel(
        properties.name,
        10 * properties.major + properties.minor,
        properties.multi_processor_count,
        int(torch.cuda.mem_get_info(device)[1]),
    )


def capability() -> int:
    """Compute capability that kernels are compiled for; 0 without a GPU."""
    if _meta is not None:
        return _meta.capability
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def uses_gpu_kernels(device: torch.device) -> bool:
    return device.type in ("cuda", "meta")
