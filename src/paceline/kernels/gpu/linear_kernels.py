"""Kernels of products of few rows with a large matrix; `linear.py` launches them."""

import triton
import triton.language as tl

from paceline.kernels.gpu.four_bit_tile import add_four_bit, fetch_four_bit
from paceline.kernels.gpu.gated import SILU, activate
from paceline.kernels.gpu.launch import gdc_launch, gdc_wait, hashed
from paceline.kernels.gpu.normed import norm_factor, square_units
from paceline.kernels.gpu.weight_tile import fetch_ahead, load_weights


@triton.jit
def _rows_of(x_ptr, rows, ks, m, k: tl.constexpr, stride):
    """[BLOCK_K, BLOCK_T]: rows of x as columns."""
    return tl.load(
        x_ptr + rows[None, :] * stride + ks[:, None], mask=(rows[None, :] < m) & (ks[:, None] < k), other=0.0
    )


@hashed
@triton.jit
def _sum_columns(
    acc, x_ptr, w_ptr, scale_ptr, outs, is_out, rows, m, k: tl.constexpr, stride_x, groups, first, share: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUPED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """acc + W x^T over `share` inputs from `first` on, of dense or 8-bit weights. Waits for the previous kernel."""
    w_ptrs = w_ptr + outs[:, None].to(tl.int64) * k
    # HAZARD: after the addresses. If the compiler places their computation behind the wait, a pass of one row is 4% slower
    gdc_launch(PDL)
    if PDL and AHEAD > 0:
        fetch_ahead(w_ptrs + first, is_out, k - first, AHEAD * BLOCK_K)
    gdc_wait(PDL)
    for start in range(0, share, BLOCK_K):
        ks = first + start + tl.arange(0, BLOCK_K)
        mask = is_out[:, None] & (ks[None, :] < k)
        w = load_weights(w_ptrs + ks[None, :], mask, EVEN, x_ptr.dtype.element_ty)
        x = _rows_of(x_ptr, rows, ks, m, k, stride_x)
        if GROUPED:
            group = (first + start) // BLOCK_K
            scale = tl.load(scale_ptr + outs * groups + group, mask=is_out & (group < groups), other=0.0)
            acc += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, residual_ptr, out_ptr, next_ptr, scaled_ptr, squares_ptr,
    partial_ptr, counter_ptr,
    m, n, k: tl.constexpr, stride_x, groups, padded_n,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEXT: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    FOUR_BIT: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """FOUR_BIT: inputs per group of 4-bit weights, whose words are at `scale_ptr`; 0 for other weights."""
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    # Columns of one split. HAZARD: no tl.cdiv, whose result is no constant and cannot be passed to a function as one
    share: tl.constexpr = ((k + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    first = tl.program_id(2) * share
    if FOUR_BIT:
        gdc_launch(PDL)
        if PDL and AHEAD > 0:
            fetch_four_bit(w_ptr, tl.program_id(0) * BLOCK_N, n, first, groups, BLOCK_N, AHEAD * BLOCK_K, FOUR_BIT)
        gdc_wait(PDL)
        for start in range(0, share, BLOCK_K):
            acc = add_four_bit(
                acc, w_ptr, scale_ptr, outs, outs < n, x_ptr, rows * stride_x, rows < m, first + start, groups, padded_n,
                k, BLOCK_K, FOUR_BIT, KIND, EVEN, PRECISION,
            )  # fmt: skip
    else:
        acc = _sum_columns(
            acc, x_ptr, w_ptr, scale_ptr, outs, outs < n, rows, m, k, stride_x, groups, first, share,
            BLOCK_K, GROUPED, EVEN, PRECISION, AHEAD, PDL,
        )  # fmt: skip
    if SPLITS > 1:
        # Each split stores its sum; the last to finish adds all of them in a fixed order
        group_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        sums = partial_ptr + group_index * (SPLITS * BLOCK_N * BLOCK_T) + within
        tl.store(sums + tl.program_id(2) * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + group_index, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counter_ptr + group_index, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(sums + split * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
    if SCALES:
        acc *= tl.load(scale_ptr + outs, mask=outs < n, other=0.0)[:, None]
    inside = (outs[:, None] < n) & (rows[None, :] < m)
    place = rows[None, :] * n + outs[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < n, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        # Rounded first, as a product that the vendor's library stores before the residual is added
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32) + residual
    hidden = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, hidden, mask=inside)
    if NEXT:
        wide = hidden.to(tl.float32)
        weight = tl.load(next_ptr + outs, mask=outs < n, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * weight[:, None]).to(scaled_ptr.dtype.element_ty), mask=inside)
        squares = tl.sum(square_units(tl.where(inside, wide, 0.0)), 0)
        tl.store(squares_ptr + rows * tl.num_programs(0) + tl.program_id(0), squares, mask=rows < m)


@triton.jit
def pair_kernel(
    x_ptr, w_ptr, scale_ptr, squares_ptr, bias_ptr, out_ptr,
    cos_ptr, sin_ptr, position_ptr, slot_ptr, key_ptr, value_ptr, partial_ptr, counter_ptr,
    m, n, k: tl.constexpr, distance, stride_x, groups, padded_n, eps, parts, num_q, num_kv,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    ROTARY: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    FOUR_BIT: tl.constexpr, KIND: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """n pairs of outputs, rows `first` and `first + distance` of W: gate and up, or the two halves of a head that rotate
    together; then `distance` is half a head."""
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    strip = tl.arange(0, 2 * BLOCK_N)  # the first rows of the pairs in the strip, then the second rows
    members = tl.program_id(0) * BLOCK_N + strip % BLOCK_N
    outs = (members // distance) * 2 * distance + members % distance if ROTARY else members
    outs += (strip // BLOCK_N) * distance
    acc = tl.zeros([2 * BLOCK_N, BLOCK_T], tl.float32)
    # Columns of one split. HAZARD: no tl.cdiv, whose result is no constant and cannot be passed to a function as one
    share: tl.constexpr = ((k + BLOCK_K - 1) // BLOCK_K + SPLITS - 1) // SPLITS * BLOCK_K
    first = tl.program_id(2) * share if SPLITS > 1 else 0
    if FOUR_BIT:
        gdc_launch(PDL)
        if PDL and AHEAD > 0:
            start = tl.program_id(0) * BLOCK_N
            start = (start // distance) * 2 * distance + start % distance if ROTARY else start
            fetch_four_bit(w_ptr, start, 2 * n, first, groups, BLOCK_N, AHEAD * BLOCK_K, FOUR_BIT)
            fetch_four_bit(w_ptr, start + distance, 2 * n, first, groups, BLOCK_N, AHEAD * BLOCK_K, FOUR_BIT)
        gdc_wait(PDL)
        for start in range(0, share, BLOCK_K):
            acc = add_four_bit(
                acc, w_ptr, scale_ptr, outs, members < n, x_ptr, rows * stride_x, rows < m, first + start, groups, padded_n,
                k, BLOCK_K, FOUR_BIT, KIND, EVEN, PRECISION,
            )  # fmt: skip
    else:
        acc = _sum_columns(
            acc, x_ptr, w_ptr, scale_ptr, outs, members < n, rows, m, k, stride_x, groups, first, share,
            BLOCK_K, GROUPED, EVEN, PRECISION, AHEAD, PDL,
        )  # fmt: skip
    if SPLITS > 1:
        # As in `linear_kernel`
        group_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        within = strip[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        sums = partial_ptr + group_index * (SPLITS * 2 * BLOCK_N * BLOCK_T) + within
        tl.store(sums + tl.program_id(2) * (2 * BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + group_index, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(counter_ptr + group_index, 0)
        acc = tl.zeros([2 * BLOCK_N, BLOCK_T], tl.float32)
        for split in tl.static_range(SPLITS):
            acc += tl.load(sums + split * (2 * BLOCK_N * BLOCK_T), cache_modifier=".cg")
    if SCALES:
        acc *= tl.load(scale_ptr + outs, mask=members < n, other=0.0)[:, None]
    # Rounded first, as a product that the vendor's library stores before the norm's factor is applied
    acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
    factor = norm_factor(squares_ptr, rows, rows < m, k, eps, parts, PARTS)[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + outs, mask=members < n, other=0.0).to(tl.float32)[:, None]
        acc = tl.fma(acc, tl.broadcast_to(factor, acc.shape), tl.broadcast_to(bias, acc.shape))
    else:
        acc *= factor
    low, high = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_T]), (1, 2, 0)))
    pairs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, offset = pairs // distance, pairs % distance
    inside = (pairs[:, None] < n) & (rows[None, :] < m)
    if not ROTARY:
        gated = activate(low, high, SILU)
        tl.store(out_ptr + rows[None, :] * n + pairs[:, None], gated.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # A strip may span heads, so each element is stored separately: q in its buffer, k and v in the cache.
        position = tl.load(position_ptr + rows, mask=rows < m, other=0)
        turns = (head < num_q + num_kv)[:, None] & inside
        angle = position[None, :] * distance + offset[:, None]
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        kind = out_ptr.dtype.element_ty
        turned_low, turned_high = rotate(low, high, cos, sin)
        rotated_low = tl.where(turns, turned_low, low).to(kind)
        rotated_high = tl.where(turns, turned_high, high).to(kind)
        is_q = (head < num_q)[:, None] & inside
        place = rows[None, :] * (num_q * 2 * distance) + (head * 2 * distance + offset)[:, None]
        tl.store(out_ptr + place, rotated_low, mask=is_q)
        tl.store(out_ptr + place + distance, rotated_high, mask=is_q)
        slot = tl.load(slot_ptr + rows, mask=rows < m, other=0)
        cached = key_ptr.dtype.element_ty
        is_k = (head >= num_q)[:, None] & turns
        place = slot[None, :] * (num_kv * 2 * distance) + ((head - num_q) * 2 * distance + offset)[:, None]
        cached_low, cached_high = rotated_low.to(tl.float32).to(cached), rotated_high.to(tl.float32).to(cached)
        tl.store(key_ptr + place, cached_low, mask=is_k)
        tl.store(key_ptr + place + distance, cached_high, mask=is_k)
        is_v = (head >= num_q + num_kv)[:, None] & inside
        place -= num_kv * 2 * distance
        tl.store(value_ptr + place, cached_low, mask=is_v)
        tl.store(value_ptr + place + distance, cached_high, mask=is_v)


@hashed
@triton.jit
def rotate(low, high, cos, sin):
    """The two halves of heads, rotated. What is rounded is written out, since a compiler may join products and sums."""
    return tl.fma(low, cos, -(high * sin)), tl.fma(high, cos, low * sin)


@triton.jit
def embed_kernel(
    id_ptr, table_ptr, norm_ptr, out_ptr, scaled_ptr, squares_ptr, d, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    gdc_launch(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    token = tl.load(id_ptr + row).to(tl.int64)
    hidden = tl.load(table_ptr + token * d + columns, mask=columns < d, other=0.0)
    wide = hidden.to(tl.float32)
    weight = tl.load(norm_ptr + columns, mask=columns < d, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * d + columns, hidden, mask=columns < d)
    tl.store(scaled_ptr + row * d + columns, (wide * weight).to(scaled_ptr.dtype.element_ty), mask=columns < d)
    tl.store(squares_ptr + row, tl.sum(square_units(wide)))
