"""Products of few rows with a large matrix, fused with the operations around them in a decoder layer.

A pass over few tokens reads every weight once and does little arithmetic, so these kernels are built around wide weight
loads: one program computes a strip of outputs and streams its weights over all of K. The order of the sums does not depend on
the number of rows. Weights are dense, or 8-bit (int8, float8_e4m3fn) with float32 scales.

    linear            y = x W^T [+ bias] [+ residual]
    gate_up           silu(x G^T) * (x U^T)
    qkv_rotary_store  q, rotated; k, rotated, and v are stored in the paged cache

The RMS norm between them needs no kernel. The kernel that writes the residual stream h also writes h * w_norm and the sums of
h^2 over its strip (`Normed`). The kernel that reads them applies r = rsqrt(mean(h^2) + eps) to the products: norm(h) W^T = r
((h * w_norm) W^T).

Programs may start while the previous kernel ends (programmatic dependent launch): they prefetch weights, which no kernel
writes, and wait before they access activations.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.tiles import Tile, block_rows, tile_for
from paceline.kernels.gpu.weight_tile import fetch_ahead, load_weights
from paceline.kernels.linear import LinearWeight
from paceline.kernels.packing import PackedWeight
from paceline.kernels.quantized import GROUP, QuantizedWeight

MAX_ROWS = 64
"""Most rows of these kernels. Larger products are not bound by the weights and use the vendor's library."""


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """Hidden states before the last factor of the RMS norm, which is one number per row."""

    scaled: Tensor  # [T, D], h * w_norm
    squares: Tensor  # [T, P] float32, sums of h^2 over P strips
    eps: float


@triton.jit
def _rows_of(x_ptr, rows, ks, m, k: tl.constexpr, stride):
    """[BLOCK_K, BLOCK_T]: rows of x as columns."""
    return tl.load(
        x_ptr + rows[None, :] * stride + ks[:, None], mask=(rows[None, :] < m) & (ks[:, None] < k), other=0.0
    )


@triton.jit
def _norm_factor(squares_ptr, rows, m, k: tl.constexpr, eps, parts, PARTS: tl.constexpr):
    strips = tl.arange(0, PARTS)
    inside = (rows[:, None] < m) & (strips < parts)[None, :]
    squares = tl.load(squares_ptr + rows[:, None] * parts + strips[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / k + eps)


@triton.jit
def _linear_kernel(
    x_ptr, w_ptr, scale_ptr, squares_ptr, bias_ptr, residual_ptr, out_ptr, next_ptr, scaled_ptr, next_squares_ptr,
    partial_ptr, counter_ptr,
    m, n, k: tl.constexpr, stride_x, groups, eps, parts,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEXT: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptrs = w_ptr + outs[:, None].to(tl.int64) * k
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    share: tl.constexpr = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K  # columns of one split
    first = tl.program_id(2) * share
    gdc_launch(PDL)
    if PDL and AHEAD > 0:
        fetch_ahead(w_ptrs + first, outs < n, k - first, AHEAD * BLOCK_K)
    gdc_wait(PDL)
    for start in range(0, share, BLOCK_K):
        ks = first + start + tl.arange(0, BLOCK_K)
        mask = (outs[:, None] < n) & (ks[None, :] < k)
        w = load_weights(w_ptrs + ks[None, :], mask, EVEN, x_ptr.dtype.element_ty)
        x = _rows_of(x_ptr, rows, ks, m, k, stride_x)
        if GROUPED:
            group = (first + start) // BLOCK_K
            scale = tl.load(scale_ptr + outs * groups + group, mask=(outs < n) & (group < groups), other=0.0)
            acc += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
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
    if PARTS > 0:
        acc *= _norm_factor(squares_ptr, rows, m, k, eps, parts, PARTS)[None, :]
    if SCALES:
        acc *= tl.load(scale_ptr + outs, mask=outs < n, other=0.0)[:, None]
    inside = (outs[:, None] < n) & (rows[None, :] < m)
    place = rows[None, :] * n + outs[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outs, mask=outs < n, other=0.0).to(tl.float32)[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    hidden = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + place, hidden, mask=inside)
    if NEXT:
        wide = hidden.to(tl.float32)
        weight = tl.load(next_ptr + outs, mask=outs < n, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + place, (wide * weight[:, None]).to(scaled_ptr.dtype.element_ty), mask=inside)
        # float64 sums these squares without rounding, so that the order of threads does not change the bits
        exact = tl.where(inside, wide, 0.0).to(tl.float64)
        squares = tl.sum(exact * exact, 0).to(tl.float32)
        tl.store(next_squares_ptr + rows * tl.num_programs(0) + tl.program_id(0), squares, mask=rows < m)


@triton.jit
def _pair_kernel(
    x_ptr, w_ptr, scale_ptr, squares_ptr, bias_ptr, out_ptr,
    cos_ptr, sin_ptr, position_ptr, slot_ptr, key_ptr, value_ptr,
    m, n, k: tl.constexpr, distance, stride_x, groups, eps, parts, num_q, num_kv,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    ROTARY: tl.constexpr, BIAS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """n pairs of outputs, rows `first` and `first + distance` of W: gate and up, or the two halves of a head that rotate
    together; then `distance` is half a head."""
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    strip = tl.arange(0, 2 * BLOCK_N)  # the first rows of the pairs in the strip, then the second rows
    members = tl.program_id(0) * BLOCK_N + strip % BLOCK_N
    outs = (members // distance) * 2 * distance + members % distance if ROTARY else members
    outs += (strip // BLOCK_N) * distance
    w_ptrs = w_ptr + outs[:, None].to(tl.int64) * k
    acc = tl.zeros([2 * BLOCK_N, BLOCK_T], tl.float32)
    gdc_launch(PDL)
    if PDL and AHEAD > 0:
        fetch_ahead(w_ptrs, members < n, k, AHEAD * BLOCK_K)
    gdc_wait(PDL)
    for start in range(0, k, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        mask = (members[:, None] < n) & (ks[None, :] < k)
        w = load_weights(w_ptrs + ks[None, :], mask, EVEN, x_ptr.dtype.element_ty)
        x = _rows_of(x_ptr, rows, ks, m, k, stride_x)
        if GROUPED:
            scale = tl.load(scale_ptr + outs * groups + start // BLOCK_K, mask=members < n, other=0.0)
            acc += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
    acc *= _norm_factor(squares_ptr, rows, m, k, eps, parts, PARTS)[None, :]
    if SCALES:
        acc *= tl.load(scale_ptr + outs, mask=members < n, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outs, mask=members < n, other=0.0).to(tl.float32)[:, None]
    low, high = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_T]), (1, 2, 0)))
    pairs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    head, offset = pairs // distance, pairs % distance
    inside = (pairs[:, None] < n) & (rows[None, :] < m)
    if not ROTARY:
        gated = low / (1.0 + tl.exp(-low)) * high
        tl.store(out_ptr + rows[None, :] * n + pairs[:, None], gated.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # A strip may span heads, so each element is stored separately: q in its buffer, k and v in the cache.
        position = tl.load(position_ptr + rows, mask=rows < m, other=0)
        turns = (head < num_q + num_kv)[:, None] & inside
        angle = position[None, :] * distance + offset[:, None]
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
        kind = out_ptr.dtype.element_ty
        rotated_low = (low * cos - high * sin).to(kind)
        rotated_high = (high * cos + low * sin).to(kind)
        is_q = (head < num_q)[:, None] & inside
        place = rows[None, :] * (num_q * 2 * distance) + (head * 2 * distance + offset)[:, None]
        tl.store(out_ptr + place, rotated_low, mask=is_q)
        tl.store(out_ptr + place + distance, rotated_high, mask=is_q)
        slot = tl.load(slot_ptr + rows, mask=rows < m, other=0)
        cached = key_ptr.dtype.element_ty
        is_k = (head >= num_q)[:, None] & turns
        place = slot[None, :] * (num_kv * 2 * distance) + ((head - num_q) * 2 * distance + offset)[:, None]
        tl.store(key_ptr + place, rotated_low.to(cached), mask=is_k)
        tl.store(key_ptr + place + distance, rotated_high.to(cached), mask=is_k)
        is_v = (head >= num_q + num_kv)[:, None] & inside
        place -= num_kv * 2 * distance
        tl.store(value_ptr + place, rotated_low.to(cached), mask=is_v)
        tl.store(value_ptr + place + distance, rotated_high.to(cached), mask=is_v)


@triton.jit
def _embed_kernel(
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
    tl.store(squares_ptr + row, tl.sum(wide * wide))


def embed(ids: Tensor, table: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Normed]:
    """Rows `ids` [T] of table [V, D], and the same rows as `Normed` for the next norm."""
    assert ids.is_contiguous()
    rows, width = len(ids), table.shape[1]
    hidden, scaled = (torch.empty(rows, width, dtype=norm.dtype, device=table.device) for _ in range(2))
    squares = torch.empty(rows, 1, dtype=torch.float32, device=table.device)
    _embed_kernel[(rows,)](
        ids, table, norm, hidden, scaled, squares, width, BLOCK=triton.next_power_of_2(width), num_warps=8, **PDL
    )
    return hidden, Normed(scaled, squares, eps)


def linear(
    x: Tensor | Normed,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] -> [T, N], written to `out` if given."""
    rows = x.scaled if isinstance(x, Normed) else x
    if out is None:
        out = torch.empty(len(rows), weight.shape[0], dtype=out_dtype or rows.dtype, device=rows.device)
    _linear(x, weight, out, bias=bias, tile=tile)
    return out


def add_linear(
    x: Tensor, weight: LinearWeight, residual: Tensor, next_norm: Tensor, eps: float, tile: Tile | None = None
) -> tuple[Tensor, Normed]:
    """h = residual + x W^T [T, N], and h as `Normed` for the next norm."""
    hidden, scaled = torch.empty_like(residual), torch.empty_like(residual)
    tile = _fit(tile, weight, len(x))
    strips = triton.cdiv(weight.shape[0], tile.outputs)
    squares = torch.empty(len(x), strips, dtype=torch.float32, device=x.device)
    _linear(x, weight, hidden, residual=residual, following=(next_norm, scaled, squares), tile=tile)
    return hidden, Normed(scaled, squares, eps)


def gate_up(x: Normed, weight: LinearWeight, tile: Tile | None = None) -> Tensor:
    """x [T, K], weight [2F, K], gate first -> silu(gate) * up [T, F]."""
    pairs = weight.shape[0] // 2
    out = torch.empty(len(x.scaled), pairs, dtype=x.scaled.dtype, device=x.scaled.device)
    _pair(x, weight, out, distance=pairs, tile=tile)
    return out


def qkv_rotary_store(
    x: Normed,
    weight: LinearWeight,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, K], weight [(H + 2 KV) hd, K], cos and sin [max_position, hd/2], positions and slots [T] -> q [T, H, hd]."""
    kv_heads, width = key_cache.shape[2], key_cache.shape[3]
    out = torch.empty(len(x.scaled), num_heads, width, dtype=x.scaled.dtype, device=x.scaled.device)
    rotary = (cos, sin, positions, slots, key_cache, value_cache)
    _pair(x, weight, out, distance=width // 2, rotary=rotary, heads=(num_heads, kv_heads), bias=bias, tile=tile)
    return out


def _linear(
    x: Tensor | Normed,
    weight: LinearWeight,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    following: tuple[Tensor, Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> None:
    assert not isinstance(weight, PackedWeight)  # packed weights are for CPUs
    values, squares, eps = (x.scaled, x.squares, x.eps) if isinstance(x, Normed) else (x, None, 0.0)
    (rows, inputs), outputs = values.shape, weight.shape[0]
    scales = weight.scales if isinstance(weight, QuantizedWeight) else None
    tile, block_t = _fit(tile, weight, rows), block_rows(rows)
    parts = 0 if squares is None else squares.shape[1]
    strips, blocks, splits = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block_t), tile.splits
    partial = counters = None
    if splits > 1:
        partial = torch.empty(strips * blocks * splits * tile.outputs * block_t, dtype=torch.float32, device=out.device)
        counters = _split_counters(strips * blocks, out.device)
    _linear_kernel[(strips, blocks, splits)](
        values, weight.values, scales, squares, bias, residual, out, *(following or (None, None, None)),
        partial, counters,
        rows, outputs, inputs, values.stride(0), 0 if scales is None else scales.shape[1], eps, parts,
        BLOCK_T=block_t, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
        PARTS=triton.next_power_of_2(parts) if parts else 0, SPLITS=splits,
        BIAS=bias is not None, RESIDUAL=residual is not None, NEXT=following is not None,
        SCALES=scales is not None and scales.shape[1] == 1, GROUPED=scales is not None and scales.shape[1] > 1,
        EVEN=outputs % tile.outputs == 0 and inputs % (tile.inputs * splits) == 0,
        PRECISION="ieee" if values.dtype is torch.float32 else "tf32",
        AHEAD=tile.ahead, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip


def _pair(
    x: Normed,
    weight: LinearWeight,
    out: Tensor,
    distance: int,
    rotary: tuple[Tensor | None, ...] = (None,) * 6,
    heads: tuple[int, int] = (0, 0),
    bias: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    assert not isinstance(weight, PackedWeight)
    (rows, inputs), pairs, parts = x.scaled.shape, weight.shape[0] // 2, x.squares.shape[1]
    scales = weight.scales if isinstance(weight, QuantizedWeight) else None
    tile, block_t = _fit(tile, weight, rows, is_paired=True), block_rows(rows)
    _pair_kernel[(triton.cdiv(2 * pairs, tile.outputs), triton.cdiv(rows, block_t))](
        x.scaled, weight.values, scales, x.squares, bias, out, *rotary,
        rows, pairs, inputs, distance, x.scaled.stride(0), 0 if scales is None else scales.shape[1], x.eps, parts, *heads,
        BLOCK_T=block_t, BLOCK_N=tile.outputs // 2, BLOCK_K=tile.inputs, PARTS=triton.next_power_of_2(parts),
        ROTARY=rotary[0] is not None, BIAS=bias is not None,
        SCALES=scales is not None and scales.shape[1] == 1, GROUPED=scales is not None and scales.shape[1] > 1,
        EVEN=2 * pairs % tile.outputs == 0 and inputs % tile.inputs == 0,
        PRECISION="ieee" if x.scaled.dtype is torch.float32 else "tf32",
        AHEAD=tile.ahead, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip


_COUNTERS: dict[tuple[torch.device, int], list[Tensor]] = {}


def _split_counters(count: int, device: torch.device) -> Tensor:
    """Counters that are zero between launches. All kernels of a stream share one set, because a kernel counts only after the
    kernels before it have ended. Smaller sets are kept when a larger one is needed: captured graphs still use them."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _COUNTERS.setdefault((device, stream), [])
    if not known or len(known[-1]) < count:
        known.append(torch.zeros(max(4096, count), dtype=torch.int32, device=device))
    return known[-1]


def _fit(tile: Tile | None, weight: LinearWeight, rows: int, is_paired: bool = False) -> Tile:
    assert not isinstance(weight, PackedWeight)
    tile = tile or tile_for(rows, *weight.shape, weight.values.element_size(), is_paired)
    if isinstance(weight, QuantizedWeight) and weight.scales.shape[1] > 1:
        return replace(tile, inputs=GROUP)  # a tile has one scale per output
    return tile
