"""Routed experts: a product with a different matrix for each group of rows, as `kernels/experts.py` defines it.

    route     the experts of each row and their weights
    sort      pairs of row and expert, sorted by expert
    gate_up   act(x G^T) * (x U^T) of each pair
    down      y W^T of each pair
    combine   the weighted sum over the experts of a row, in their order

A program computes a strip of outputs for some rows of one expert and streams its weights over all inputs: a pass of few tokens
reads the matrices of the experts in use once. Programs without rows end at once, and the size of a launch depends on the number
of rows alone, so that a pass can be captured. The order of the sums of a row does not depend on the other rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.activation import NUMBERS
from paceline.kernels.experts import Experts, Routing
from paceline.kernels.gpu.gated import activate
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.linear import linear
from paceline.kernels.gpu.weight_tile import load_weights
from paceline.kernels.linear import LinearWeight
from paceline.kernels.packing import PackedWeight
from paceline.kernels.quantized import GROUP, QuantizedWeight

_OUTPUTS, _INPUTS = 64, 128
"""Outputs and inputs of a tile of weights."""
_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a program."""
_SORTED_AT_ONCE = 1024
"""Most pairs that one program sorts."""


def feed_experts(x: Tensor, experts: Experts) -> Tensor:
    """x [T, D] -> [T, D]."""
    ids, weights = route(linear(x, experts.router, experts.router_bias, out_dtype=torch.float32), experts.routing)
    order, starts = sort_pairs(ids, experts.routing.num_experts)
    inner = experts.gate_up.shape[0] // experts.routing.num_experts // 2
    active = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    _multiply(x, experts.gate_up, experts.gate_up_bias, active, order, starts, experts, is_paired=True)
    fed = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(active, experts.down, experts.down_bias, fed, order, starts, experts, is_paired=False)
    out, per_token = torch.empty_like(x), experts.routing.per_token
    block = triton.next_power_of_2(x.shape[1])
    _combine[(len(x),)](fed, weights, out, WIDTH=x.shape[1], BLOCK=block, PER_TOKEN=per_token, num_warps=4, **PDL)
    return out


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] float32 -> ids [T, k] int32 and weights [T, k] float32 of each row's experts."""
    rows, num_experts = logits.shape
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, routing.per_token, dtype=torch.float32, device=logits.device)
    _route[(rows,)](
        logits, ids, weights, EXPERTS=num_experts, BLOCK=triton.next_power_of_2(num_experts),
        PER_TOKEN=routing.per_token, SLOTS=triton.next_power_of_2(routing.per_token), NORMALIZED=routing.is_normalized,
        num_warps=1, **PDL,
    )  # fmt: skip
    return ids, weights


def sort_pairs(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """ids [T, k] -> order [T k] int32, the pairs by expert and then by row; starts [E + 1] int32, the first pair of each."""
    count = ids.numel()
    if count > _SORTED_AT_ONCE:
        values, order = ids.view(-1).sort(stable=True)
        edges = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
        return order.to(torch.int32), torch.searchsorted(values, edges, out_int32=True)
    order = torch.empty(count, dtype=torch.int32, device=ids.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    pairs = triton.next_power_of_2(count)
    _sort[(triton.cdiv(max(count, num_experts + 1), 32),)](
        ids, order, starts, count, num_experts, PAIRS=pairs, PART=32, num_warps=4, **PDL
    )
    return order, starts


def _multiply(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out: Tensor,
    order: Tensor,
    starts: Tensor,
    experts: Experts,
    is_paired: bool,
) -> None:
    """`is_paired`: gate and up of rows of x, stored in the sorted order; otherwise down of sorted rows, stored by pair."""
    assert not isinstance(weight, PackedWeight)  # packed weights are for CPUs
    count, per_token = experts.routing.num_experts, experts.routing.per_token
    rows, outputs, inputs = len(order) // per_token, out.shape[1], weight.shape[1]
    block_t = _FEW_ROWS if rows <= _MANY_ROWS else _MANY_ROWS
    scales = weight.scales if isinstance(weight, QuantizedWeight) else None
    groups = 0 if scales is None else scales.shape[1]
    block_n = _OUTPUTS // 2 if is_paired else _OUTPUTS
    _product[(triton.cdiv(outputs, block_n), count, triton.cdiv(rows, block_t))](
        x, weight.values, scales, bias, order, starts, out, outputs, groups,
        K=inputs, PER_TOKEN=per_token, PAIRED=is_paired, KIND=NUMBERS[experts.activation],
        BIAS=bias is not None, SCALES=groups == 1, GROUPED=groups > 1,
        BLOCK_T=block_t, BLOCK_N=block_n, BLOCK_K=GROUP if groups > 1 else _INPUTS,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=4, num_stages=3, **PDL,
    )  # fmt: skip


@triton.jit
def _route(
    logits_ptr, id_ptr, weight_ptr,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, SLOTS: tl.constexpr,
    NORMALIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOTS)
    logits = tl.load(logits_ptr + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
    best = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - best), 0)
    ids = tl.zeros([SLOTS], tl.int32)
    weights = tl.zeros([SLOTS], tl.float32)
    is_free = expert < EXPERTS
    for i in tl.static_range(PER_TOKEN):
        largest = tl.max(tl.where(is_free, logits, float("-inf")), 0)
        chosen = tl.min(tl.where(is_free & (logits == largest), expert, BLOCK), 0)  # the first of equal logits
        is_free &= expert != chosen
        ids = tl.where(slot == i, chosen, ids)
        weights = tl.where(slot == i, tl.exp(largest - best), weights)
    if NORMALIZED:
        total = tl.sum(weights, 0)
    at = row * PER_TOKEN + slot
    tl.store(id_ptr + at, ids, mask=slot < PER_TOKEN)
    tl.store(weight_ptr + at, weights / total, mask=slot < PER_TOKEN)


@triton.jit
def _sort(id_ptr, order_ptr, start_ptr, count, num_experts, PAIRS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr):
    """A program places PART pairs: the place of a pair is the number of pairs before it."""
    gdc_wait(PDL)
    gdc_launch(PDL)
    every, own = tl.arange(0, PAIRS), tl.program_id(0) * PART + tl.arange(0, PART)
    ids = tl.load(id_ptr + every, mask=every < count, other=1 << 20)
    mine = tl.load(id_ptr + own, mask=own < count, other=1 << 20)
    is_before = (ids[None, :] < mine[:, None]) | ((ids[None, :] == mine[:, None]) & (every[None, :] < own[:, None]))
    place = tl.sum(is_before.to(tl.int32), 1)
    tl.store(order_ptr + place, own, mask=own < count)
    starts = tl.sum((ids[None, :] < own[:, None]).to(tl.int32), 1)
    tl.store(start_ptr + own, starts, mask=own <= num_experts)


@triton.jit
def _product(
    x_ptr, w_ptr, scale_ptr, bias_ptr, order_ptr, start_ptr, out_ptr, n, groups,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, PAIRED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A strip of n outputs for a block of the rows of one expert. PAIRED: joined with the outputs n further on."""
    gdc_wait(PDL)
    gdc_launch(PDL)
    expert = tl.program_id(1)
    begin, end = tl.load(start_ptr + expert), tl.load(start_ptr + expert + 1)
    place = begin + tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    if begin + tl.program_id(2) * BLOCK_T >= end:
        return
    is_row = place < end
    pair = tl.load(order_ptr + place, mask=is_row, other=0)
    source = pair // PER_TOKEN if PAIRED else place
    target = place if PAIRED else pair
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    height = 2 * n if PAIRED else n  # outputs of one expert
    first = expert.to(tl.int64) * height + outs
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    other = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + source[None, :].to(tl.int64) * K + ks[:, None], mask=is_row[None, :] & (ks[:, None] < K), other=0.0
        )
        mask = (outs[:, None] < n) & (ks[None, :] < K)
        kind: tl.constexpr = x_ptr.dtype.element_ty
        w = load_weights(w_ptr + first[:, None] * K + ks[None, :], mask, False, kind)
        if GROUPED:
            group = start // BLOCK_K
            scale = tl.load(scale_ptr + first * groups + group, mask=outs < n, other=0.0)
            acc += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
        else:
            acc = tl.dot(w, x, acc, input_precision=PRECISION)
        if PAIRED:
            w = load_weights(w_ptr + (first + n)[:, None] * K + ks[None, :], mask, False, kind)
            if GROUPED:
                scale = tl.load(scale_ptr + (first + n) * groups + group, mask=outs < n, other=0.0)
                other += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
            else:
                other = tl.dot(w, x, other, input_precision=PRECISION)
    if SCALES:
        acc *= tl.load(scale_ptr + first, mask=outs < n, other=0.0)[:, None]
        if PAIRED:
            other *= tl.load(scale_ptr + first + n, mask=outs < n, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + first, mask=outs < n, other=0.0).to(tl.float32)[:, None]
        if PAIRED:
            other += tl.load(bias_ptr + first + n, mask=outs < n, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        acc = activate(acc, other, KIND)
    at = target[None, :].to(tl.int64) * n + outs[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(outs[:, None] < n) & is_row[None, :])


@triton.jit
def _combine(
    fed_ptr, weight_ptr, out_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PER_TOKEN):
        fed = tl.load(fed_ptr + (row * PER_TOKEN + i) * WIDTH + lane, mask=lane < WIDTH, other=0.0).to(tl.float32)
        total = tl.fma(fed, tl.load(weight_ptr + row * PER_TOKEN + i), total)
    tl.store(out_ptr + row * WIDTH + lane, total.to(out_ptr.dtype.element_ty), mask=lane < WIDTH)
