"""Rotary embedding of q and k, fused with the norm of their heads and with storing k and v in the paged cache, in one launch.

The kernel computes slots from the device tensors that attention reads, so that no work is needed between steps as contexts
grow. Dimensions are paired as (i, i + hd/2).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.attention.plan import search_width
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.linear_kernels import rotate
from paceline.kernels.gpu.normed import Normed, norm_arguments, row_factor

_HEADS = 8
"""Heads of one row per program."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """RMS norm of each head of q and k, before the rotation."""

    q: Tensor  # [hd]
    k: Tensor  # [hd]
    eps: float


def rotate_and_store(
    qkv: Tensor,  # [T, (H + 2 KV) hd]
    positions: Tensor,  # [T] int64
    cos: Tensor,  # [max_position, hd/2] float32
    sin: Tensor,
    key_cache: Tensor,  # [blocks, BLOCK_SIZE, KV, hd]
    value_cache: Tensor,
    starts: Tensor,  # [S + 1] int32
    context_lens: Tensor,  # [S] int32
    block_tables: Tensor,  # [S, W] int32
    first_row: int = 0,
    norms: HeadNorms | None = None,
    before: Normed | None = None,
    bias: Tensor | None = None,  # [(H + 2 KV) hd]
) -> Tensor:
    """Returns q [T, H, hd], rotated in place, as a view of `qkv`. Keys and values are stored in the caches, rounded to the type
    of `qkv` and then to that of the cache; float8 saturates. `before`: `qkv` is a product with its hidden states; its factor
    is applied here, then `bias` is added. Rows from `starts[S]` on are ignored. `first_row` is as in
    `paged_attention`."""
    assert qkv.is_contiguous()
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    rows, kv_heads, width = qkv.shape[0], key_cache.shape[2], key_cache.shape[3]
    heads = qkv.shape[1] // width - 2 * kv_heads
    num_sequences = len(context_lens)
    assert bias is None or before is not None  # a product adds it otherwise
    inputs, squares, parts, norm_eps = norm_arguments(before)
    _rotate[(rows, triton.cdiv(heads + 2 * kv_heads, _HEADS))](
        qkv,
        positions,
        cos,
        sin,
        key_cache,
        value_cache,
        starts,
        context_lens,
        block_tables,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        squares,
        bias,
        num_sequences,
        block_tables.stride(0),
        first_row,
        0.0 if norms is None else norms.eps,
        parts,
        norm_eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        PADDED=triton.next_power_of_2(width // 2),
        PAGE=BLOCK_SIZE,
        SEARCH=search_width(num_sequences),
        BLOCK=_HEADS,
        NORM=norms is not None,
        INPUTS=inputs,
        PARTS=triton.next_power_of_2(parts) if parts else 0,
        BIAS=bias is not None,
        num_warps=4,
        **PDL,
    )
    return qkv.unflatten(1, (-1, width))[:, :heads]


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "first_row"], do_not_specialize_on_alignment=["block_tables"]
)
def _rotate(
    qkv,
    positions,
    cos,
    sin,
    key_cache,
    value_cache,
    starts,
    context_lens,
    block_tables,
    q_norm,
    k_norm,
    squares,
    bias,
    num_sequences,
    table_stride,
    first_row,
    eps,
    parts,
    norm_eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    # HAZARD: no load before the wait; even the lengths are written by an earlier kernel
    gdc_wait(PDL)
    gdc_launch(PDL)
    each = tl.arange(0, SEARCH)
    ends = tl.load(starts + 1 + each, mask=each < num_sequences, other=1 << 30)
    sequence = tl.sum((ends <= row).to(tl.int32), 0)  # sequences that end before this row
    if sequence >= num_sequences:
        return
    index = tl.load(context_lens + sequence) + first_row + row - tl.load(starts + sequence)
    page = tl.load(block_tables + sequence.to(tl.int64) * table_stride + index // PAGE)
    slot = page.to(tl.int64) * PAGE + index % PAGE

    head = part * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, PADDED)
    is_kept = (head < HEADS + 2 * KV_HEADS)[:, None] & (lane < HALF)[None, :]
    at = row.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + (head * 2 * HALF)[:, None] + lane[None, :]
    low = tl.load(qkv + at, mask=is_kept, other=0.0)
    high = tl.load(qkv + at + HALF, mask=is_kept, other=0.0)
    if PARTS > 0:
        factor = row_factor(squares, row.to(tl.int64), INPUTS, norm_eps, parts, PARTS)
        low, high = low.to(tl.float32), high.to(tl.float32)
        if BIAS:
            factors, own = tl.broadcast_to(factor, low.shape), bias + (head * 2 * HALF)[:, None] + lane[None, :]
            low = tl.fma(low, factors, tl.load(own, mask=is_kept, other=0.0).to(tl.float32))
            high = tl.fma(high, factors, tl.load(own + HALF, mask=is_kept, other=0.0).to(tl.float32))
        else:
            low *= factor
            high *= factor
    if NORM:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        mean = tl.sum(wide_low * wide_low + wide_high * wide_high, 1) / (2 * HALF)
        factor = tl.rsqrt(mean + eps)[:, None]
        is_normed = (head < HEADS + KV_HEADS)[:, None]
        low = tl.where(is_normed, _norm(wide_low * factor, q_norm, k_norm, lane, head, HALF, HEADS, qkv), low)
        high = tl.where(
            is_normed, _norm(wide_high * factor, q_norm + HALF, k_norm + HALF, lane, head, HALF, HEADS, qkv), high
        )
    angle = tl.load(positions + row) * HALF + lane
    c = tl.load(cos + angle, mask=lane < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=lane < HALF, other=0.0)[None, :]
    narrow: tl.constexpr = qkv.dtype.element_ty
    low, high = low.to(tl.float32), high.to(tl.float32)
    shape: tl.constexpr = low.shape
    turned_low, turned_high = rotate(low, high, tl.broadcast_to(c, shape), tl.broadcast_to(s, shape))
    rotated_low, rotated_high = turned_low.to(narrow), turned_high.to(narrow)

    is_query = is_kept & (head < HEADS)[:, None]
    tl.store(qkv + at, rotated_low, mask=is_query)
    tl.store(qkv + at + HALF, rotated_high, mask=is_query)
    stored: tl.constexpr = key_cache.dtype.element_ty
    is_key = is_kept & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
    to = ((slot * KV_HEADS + head - HEADS) * 2 * HALF)[:, None] + lane[None, :]
    tl.store(key_cache + to, rotated_low.to(tl.float32).to(stored), mask=is_key)
    tl.store(key_cache + to + HALF, rotated_high.to(tl.float32).to(stored), mask=is_key)
    is_value = is_kept & (head >= HEADS + KV_HEADS)[:, None]
    to -= KV_HEADS * 2 * HALF
    tl.store(value_cache + to, low.to(narrow).to(tl.float32).to(stored), mask=is_value)
    tl.store(value_cache + to + HALF, high.to(narrow).to(tl.float32).to(stored), mask=is_value)


@triton.jit
def _norm(x, q_norm, k_norm, lane, head, HALF: tl.constexpr, HEADS: tl.constexpr, qkv):
    """x times the weight of its head, rounded as the torch reference is."""
    narrow: tl.constexpr = qkv.dtype.element_ty
    q_weight = tl.load(q_norm + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    k_weight = tl.load(k_norm + lane, mask=lane < HALF, other=0.0).to(tl.float32)
    weight = tl.where((head < HEADS)[:, None], q_weight[None, :], k_weight[None, :])
    return (x.to(narrow).to(tl.float32) * weight).to(narrow)
