"""Modifies logits in place before a token is picked: bias, penalties, blocked end tokens.

Order and arithmetic are those of `process` in `speculation/rows/rows.py`, to the bit. Rows of a slot without any of them are
left alone. The drafts between a slot's last committed token and a row count as output.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

MAX_BIASED, MAX_BLOCKED = 512, 64
"""Tokens of a slot that the kernels can bias and block."""
IN_PROMPT = -(1 << 31)
"""Bit 31 of `EditTensors.seen`: the prompt has the token."""
_COUNT = tl.constexpr(0x7FFFFFFF)
_CHUNK = 2048
_MOST_COMMITTED = 64
"""Tokens of one step: few variants of a kernel need no compilation while requests run."""


@dataclass(frozen=True, slots=True, eq=False)
class EditTensors:
    """What modifies the logits of each slot."""

    repetition: Tensor  # [S] float32, 1: off
    presence: Tensor  # [S] float32, 0: off
    frequency: Tensor  # [S] float32, 0: off
    first_end: Tensor  # [S] int32, first position at which the blocked tokens are allowed
    num_biased: Tensor  # [S] int32
    num_blocked: Tensor  # [S] int32
    biased: Tensor  # [S, MAX_BIASED] int32, all different
    biases: Tensor  # [S, MAX_BIASED] float32
    blocked: Tensor  # [S, MAX_BLOCKED] int32
    seen: Tensor  # [S, V] int32: how often the output has the token, and `IN_PROMPT`


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRows:
    """The drafts before each row of a pass. The first `count` rows are `each` rows of every sequence."""

    tokens: Tensor  # [S, N] int64, by slot
    each: int
    count: int
    first: int = 0
    """Drafts before the first row of a sequence: every row has one more than the row before it."""
    ancestors: Tensor | None = (
        None  # [R] int64: bit 1 + n says that node n is before the row. None if drafts are chains
    )


def edit_logits(
    logits: Tensor,  # [R, V] float32
    positions: Tensor,  # [R] int64, of the tokens to pick
    edits: EditTensors,
    slots: Tensor | None = None,  # [R] int64. None if slot s has rows s * R / S and following
    each: int = 1,  # R / S, without `slots`
    drafted: DraftedRows | None = None,  # None if no draft is before a row
) -> None:
    rows, width = logits.shape
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    assert width <= edits.seen.shape[1]
    where = slots, logits.stride(0), each
    _bias[(rows,)](
        logits, edits.num_biased, edits.biased, edits.biases, *where, width, MOST=MAX_BIASED, num_warps=4, **PDL
    )
    tokens = None if drafted is None else drafted.tokens
    assert tokens is None or tokens.shape[1] < 2 or tokens.stride(1) == 1
    # HAZARD: a fused multiplication and subtraction would round once instead of twice
    _penalise[(rows, triton.cdiv(width, _CHUNK))](
        logits,
        edits.repetition,
        edits.presence,
        edits.frequency,
        edits.seen,
        tokens,
        None if drafted is None else drafted.ancestors,
        *where,
        edits.seen.stride(0),
        0 if tokens is None else tokens.stride(0),
        0 if tokens is None else tokens.shape[1],
        1 if drafted is None else drafted.each,
        0 if drafted is None else drafted.count,
        0 if drafted is None else drafted.first,
        width,
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
        **PDL,
    )
    _block[(rows,)](
        logits, positions, edits.first_end, edits.num_blocked, edits.blocked, *where, width, MOST=MAX_BLOCKED,
        num_warps=1, **PDL,
    )  # fmt: skip


def count_tokens(
    tokens: Tensor,  # [B, W] int64, tokens committed in this step; -1: none
    edits: EditTensors,
    slots: Tensor | None = None,  # [B] int64. None if row b is of slot b
) -> None:
    """Count the tokens as output of their slots, where penalties read them."""
    rows, width = tokens.shape
    assert tokens.stride(1) == 1 or width == 1
    assert width <= _MOST_COMMITTED
    if not rows:
        return
    _count[(rows,)](
        tokens,
        edits.repetition,
        edits.presence,
        edits.frequency,
        edits.seen,
        slots,
        tokens.stride(0),
        edits.seen.stride(0),
        width,
        PADDED=_MOST_COMMITTED,
        num_warps=1,
        **PDL,
    )


@triton.jit
def _slot(slots, row, each):
    slot = (row // each).to(tl.int64)
    if slots is not None:
        slot = tl.load(slots + row)
    return slot


@triton.jit(do_not_specialize=["each", "width"], do_not_specialize_on_alignment=["num_biased", "slots", "stride"])
def _bias(
    logits, num_biased, biased, biases, slots, stride, each, width, MOST: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0)
    slot = _slot(slots, row, each)
    count = tl.load(num_biased + slot)
    if count == 0:
        return
    entry = tl.arange(0, MOST)
    token = tl.load(biased + slot * MOST + entry, mask=entry < count, other=0)
    is_entry = (entry < count) & (token < width)
    value = tl.load(biases + slot * MOST + entry, mask=is_entry, other=0.0)
    at = logits + row.to(tl.int64) * stride + token
    tl.store(at, tl.load(at, mask=is_entry, other=0.0) + value, mask=is_entry)


@triton.jit(
    do_not_specialize=["each", "width", "nodes", "drafted_each", "drafted_count", "drafted_first", "tokens_stride"],
    do_not_specialize_on_alignment=[
        "repetition", "presence", "frequency", "slots", "drafts", "ancestors", "stride", "seen_stride",
    ],
)  # fmt: skip
def _penalise(
    logits, repetition, presence, frequency, seen, drafts, ancestors, slots, stride, each, seen_stride, tokens_stride,
    nodes, drafted_each, drafted_count, drafted_first, width, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    slot = _slot(slots, row, each)
    factor, fixed, by_count = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (factor == 1.0) & (fixed == 0.0) & (by_count == 0.0):
        return
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    is_column = column < width
    known = tl.load(seen + slot * seen_stride + column, mask=is_column, other=0)
    count = known & _COUNT
    if drafts is not None:
        is_drafted = row < drafted_count
        num_before = drafted_first + row % drafted_each
        for node in range(nodes):
            if ancestors is None:
                is_before = is_drafted & (node < num_before)
            else:
                is_before = is_drafted & (((tl.load(ancestors + row) >> (node + 1)) & 1) != 0)
            token = tl.load(drafts + slot * tokens_stride + node).to(tl.int32)
            count += ((column == token) & is_before).to(tl.int32)
    at = logits + row.to(tl.int64) * stride + column
    x = tl.load(at, mask=is_column, other=0.0)
    divided = tl.div_rn(x, tl.full([CHUNK], 1.0, tl.float32) * factor)
    x = tl.where((known < 0) | (count > 0), tl.where(x > 0.0, divided, x * factor), x)
    amount = (fixed.to(tl.float64) + by_count.to(tl.float64) * count.to(tl.float64)).to(tl.float32)
    tl.store(at, tl.where(count > 0, x - amount, x), mask=is_column)


@triton.jit(
    do_not_specialize=["each", "width"],
    do_not_specialize_on_alignment=["positions", "first_end", "num_blocked", "slots", "stride"],
)
def _block(
    logits, positions, first_end, num_blocked, blocked, slots, stride, each, width,
    MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0)
    slot = _slot(slots, row, each)
    if tl.load(positions + row) >= tl.load(first_end + slot):
        return
    entry = tl.arange(0, MOST)
    is_entry = entry < tl.load(num_blocked + slot)
    token = tl.load(blocked + slot * MOST + entry, mask=is_entry, other=0)
    at = logits + row.to(tl.int64) * stride + token
    tl.store(at, tl.full([MOST], float("-inf"), tl.float32), mask=is_entry & (token < width))


@triton.jit(
    do_not_specialize=["stride", "width"],
    do_not_specialize_on_alignment=["tokens", "repetition", "presence", "frequency", "slots", "seen_stride"],
)
def _count(
    tokens, repetition, presence, frequency, seen, slots, stride, seen_stride, width,
    PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0)
    slot = _slot(slots, row, 1)
    factor, fixed, by_count = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (factor == 1.0) & (fixed == 0.0) & (by_count == 0.0):
        return
    place = tl.arange(0, PADDED)
    token = tl.load(tokens + row.to(tl.int64) * stride + place, mask=place < width, other=-1)
    tl.atomic_add(seen + slot * seen_stride + token, 1, mask=token >= 0)
