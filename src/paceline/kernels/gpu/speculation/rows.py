"""Positions and slots of the rows of a step, computed on the device from the lengths of the sequences."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_BLOCK = 128


def place_rows(
    lengths: Tensor,  # [S] int32
    offset: int,
    block_tables: Tensor,  # [S, W] int32
    context_lens: Tensor,  # [S] int32, out: lengths + offset
    positions: Tensor,  # [S * R] int64, out: context + 0 … R - 1, by sequence
    slots: Tensor,  # [S * R] int64, out
    max_position: int,
) -> None:
    """Place R rows per sequence, the first at logical index lengths + offset. Positions are below `max_position`: an
    unused slot may be at the end of the rotary table."""
    rows = len(positions)
    _place[(triton.cdiv(rows, _BLOCK),)](
        lengths, block_tables, context_lens, positions, slots, rows, offset, max_position - 1, block_tables.stride(0),
        ROWS=rows // len(lengths), PAGE=BLOCK_SIZE, BLOCK=_BLOCK, num_warps=1, **PDL,
    )  # fmt: skip


@triton.jit
def _place(
    lengths, tables, contexts, positions, slots, count, offset, last, stride,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = row < count
    sequence, own = row // ROWS, row % ROWS
    context = tl.load(lengths + sequence, mask=is_real, other=0) + offset
    index = context + own
    page = tl.load(tables + sequence * stride + index // PAGE, mask=is_real, other=0).to(tl.int64)
    tl.store(contexts + sequence, context, mask=is_real & (own == 0))
    tl.store(positions + row, tl.minimum(index, last).to(tl.int64), mask=is_real)
    tl.store(slots + row, page * PAGE + index % PAGE, mask=is_real)
