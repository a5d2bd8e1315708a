"""Rows of a mixed pass that decode: their tokens and positions come from the state of the slots, and so does where picks go."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.accept import DeviceState

_BLOCK = 128


def place_slots(
    state: DeviceState,
    drafts: Tensor | None,  # [slots, K] int64. None if K is 0
    slots: Tensor,  # [D] int64
    tokens: Tensor,  # [T] int64, out: the first D * (1 + K)
    positions: Tensor,  # [T] int64, out: the first D * (1 + K)
    context_lens: Tensor,  # [S] int32, out: the first D
    max_position: int,
) -> None:
    """Rows i * (1 + K) and following become the newest token of slot `slots[i]` and its drafts. Positions are below
    `max_position`: a sequence that has ended may be at the end of the rotary table."""
    count, depth = len(slots), 0 if drafts is None else drafts.shape[1]
    if count:
        _place[(triton.cdiv(count, _BLOCK), 1 + depth)](
            state.lengths, state.last, drafts, slots, tokens, positions, context_lens, count, max_position - 1, depth,
            BLOCK=_BLOCK, num_warps=1, **PDL,
        )  # fmt: skip


def commit_rows(
    state: DeviceState,
    rows: Tensor,  # [R] int64, rows of the pass
    slots: Tensor,  # [R] int64, their slots, all different
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    picks: Tensor,  # [R] int64, the token after each row
    first: int = 0,
) -> None:
    """Slot `slots[i]` now ends with the token of row `rows[i]` and `picks[i]`, for i from `first` on."""
    count = len(rows)
    if count > first:
        _commit[(triton.cdiv(count - first, _BLOCK),)](
            state.lengths, state.last, rows, slots, tokens, positions, picks, first, count,
            BLOCK=_BLOCK, num_warps=1, **PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count", "most", "depth"])
def _place(
    lengths, last, drafts, slots, tokens, positions, contexts, count, most, depth,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.program_id(1)  # 0: the newest token
    is_real = sequence < count
    slot = tl.load(slots + sequence, mask=is_real, other=0)
    context = tl.load(lengths + slot, mask=is_real, other=1) - 1
    token = tl.load(last + slot * 2 + 1, mask=is_real & (node == 0), other=0)
    if drafts is not None:
        token += tl.load(drafts + slot * depth + node - 1, mask=is_real & (node > 0), other=0)
    row = sequence * (depth + 1) + node
    tl.store(tokens + row, token, mask=is_real)
    tl.store(positions + row, tl.minimum(context + node, most).to(tl.int64), mask=is_real)
    tl.store(contexts + sequence, context, mask=is_real & (node == 0))


@triton.jit(do_not_specialize=["first", "count"])
def _commit(
    lengths, last, rows, slots, tokens, positions, picks, first, count, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    i = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = i < count
    row = tl.load(rows + i, mask=is_real, other=0)
    slot = tl.load(slots + i, mask=is_real, other=0)
    position = tl.load(positions + row, mask=is_real, other=0)
    tl.store(lengths + slot, (position + 2).to(tl.int32), mask=is_real)
    tl.store(last + slot * 2, tl.load(tokens + row, mask=is_real, other=0), mask=is_real)
    tl.store(last + slot * 2 + 1, tl.load(picks + i, mask=is_real, other=0), mask=is_real)
