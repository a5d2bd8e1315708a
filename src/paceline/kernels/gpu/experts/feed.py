"""A feed-forward layer of routed experts, as `kernels/experts.py` defines it.

    gate_up   act(x G^T) * (x U^T) of each pair of row and expert
    down      y W^T of each pair
    combine   the weighted sum over the experts of a row, in their order; then the output of a shared layer is added

A program computes a strip of outputs for a block of pairs of one expert and streams its weights over all inputs: a pass of few
tokens reads the matrices of the experts in use once. The size of a launch depends on the number of rows alone, so that a pass
can be captured. The order of the sums of a row does not depend on the number of rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.formats.activation import NUMBERS
from paceline.kernels.formats.experts import Experts
from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.quantized import GROUP
from paceline.kernels.gpu.experts.routing import PairBlocks, route, sort_pairs
from paceline.kernels.gpu.four_bit_tile import add_four_bit
from paceline.kernels.gpu.gated import activate, gated
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.linear import linear
from paceline.kernels.gpu.products import product
from paceline.kernels.gpu.tiles import Tile, router_tile, whole_blocks
from paceline.kernels.gpu.weight_arguments import weight_arguments
from paceline.kernels.gpu.weight_tile import load_weights


@dataclass(frozen=True, slots=True)
class ExpertTile:
    block_rows: int
    """Pairs of one program."""
    outputs: int
    """Number of outputs of a strip. A pair of gate and up counts as two."""
    inputs: int
    warps: int
    stages: int


_FEW, _SOME, _MANY = ExpertTile(8, 32, 128, 2, 4), ExpertTile(16, 32, 128, 2, 4), ExpertTile(64, 64, 128, 4, 3)
"""Tiles of up to 8, up to 64 and more rows. In a batch of 64 rows most experts have few pairs."""


def feed_experts(x: Tensor, experts: Experts) -> Tensor:
    """x [T, D] -> [T, D]."""
    routing, tile = experts.routing, _FEW if len(x) <= 8 else _SOME if len(x) <= 64 else _MANY
    split = router_tile(len(x), experts.router.shape[1])
    logits = linear(x, experts.router, experts.router_bias, out_dtype=torch.float32, tile=split)
    ids, weights = route(logits, routing, experts.choice_bias)
    blocks = sort_pairs(ids, routing.num_experts, tile.block_rows)
    inner = experts.gate_up.shape[0] // routing.num_experts // 2
    active = torch.empty(ids.numel(), inner, dtype=x.dtype, device=x.device)
    _multiply(x, experts.gate_up, experts.gate_up_bias, active, blocks, tile, experts, is_paired=True)
    fed = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    _multiply(active, experts.down, experts.down_bias, fed, blocks, tile, experts, is_paired=False)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _combine[(len(x),)](
        fed, weights, out, WIDTH=x.shape[1], BLOCK=block, PER_TOKEN=routing.per_token, num_warps=4, **PDL
    )
    if experts.shared is None:
        return out
    shared_gate_up, shared_down = experts.shared
    return out + product(gated(product(x, shared_gate_up), experts.activation), shared_down)


def _multiply(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None,
    out: Tensor,
    blocks: PairBlocks,
    tile: ExpertTile,
    experts: Experts,
    is_paired: bool,
) -> None:
    """With `is_paired` it computes gate and up of rows of x, stored in the sorted order. Otherwise it computes down of sorted
    rows, stored by pair."""
    given, outputs, inputs = weight_arguments(weight), out.shape[1], weight.shape[1]
    block_n = tile.outputs // 2 if is_paired else tile.outputs
    block_k = GROUP if given.is_grouped else tile.inputs
    if isinstance(weight, FourBitWeight):
        block_k = whole_blocks(Tile(tile.outputs, 2 * tile.inputs, tile.warps, tile.stages), inputs).inputs
    _product[(triton.cdiv(outputs, block_n), blocks.count)](
        x, given.codes, given.scales, bias, blocks.order, blocks.experts, blocks.begins, blocks.ends, out,
        outputs, given.groups, given.padded_outputs,
        K=inputs, PER_TOKEN=experts.routing.per_token, PAIRED=is_paired, KIND=NUMBERS[experts.activation],
        BIAS=bias is not None, SCALES=given.has_scales, GROUPED=given.is_grouped,
        FOUR_BIT=given.four_bit, FOUR_BIT_KIND=given.kind,
        EVEN=outputs % block_n == 0 and (given.four_bit > 0 or inputs % block_k == 0),
        BLOCK_T=tile.block_rows, BLOCK_N=block_n, BLOCK_K=block_k,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip


@triton.jit
def _product(
    x_ptr, w_ptr, scale_ptr, bias_ptr, order_ptr, expert_ptr, begin_ptr, end_ptr, out_ptr, n, groups, padded_n,
    K: tl.constexpr, PER_TOKEN: tl.constexpr, PAIRED: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr, FOUR_BIT: tl.constexpr,
    FOUR_BIT_KIND: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A strip of n outputs for a block of pairs of one expert. PAIRED: joined with the outputs n further on."""
    gdc_wait(PDL)
    gdc_launch(PDL)
    block = tl.program_id(1)
    expert, begin, end = tl.load(expert_ptr + block), tl.load(begin_ptr + block), tl.load(end_ptr + block)
    if begin >= end:
        return
    place = begin + tl.arange(0, BLOCK_T)
    is_row = place < end
    pair = tl.load(order_ptr + place, mask=is_row, other=0)
    source = pair // PER_TOKEN if PAIRED else place
    target = place if PAIRED else pair
    HEIGHT: tl.constexpr = 2 * BLOCK_N if PAIRED else BLOCK_N
    strip = tl.arange(0, HEIGHT)  # outputs, then those that are n further on
    member = tl.program_id(0) * BLOCK_N + strip % BLOCK_N
    is_out = member < n
    outs = expert.to(tl.int64) * (2 * n if PAIRED else n) + member + strip // BLOCK_N * n
    x_offsets = source.to(tl.int64) * K
    acc = tl.zeros([HEIGHT, BLOCK_T], tl.float32)
    if FOUR_BIT:
        for start in range(0, tl.cdiv(K, 128) * 128, BLOCK_K):
            acc = add_four_bit(
                acc, w_ptr, scale_ptr, outs, is_out, x_ptr, x_offsets, is_row, start, groups, padded_n,
                K, BLOCK_K, FOUR_BIT, FOUR_BIT_KIND, EVEN, PRECISION,
            )  # fmt: skip
    else:
        for start in range(0, K, BLOCK_K):
            ks = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + x_offsets[None, :] + ks[:, None], mask=is_row[None, :] & (ks[:, None] < K), other=0.0)
            mask = is_out[:, None] & (ks[None, :] < K)
            w = load_weights(w_ptr + outs[:, None] * K + ks[None, :], mask, EVEN, x_ptr.dtype.element_ty)
            if GROUPED:
                scale = tl.load(scale_ptr + outs * groups + start // BLOCK_K, mask=is_out, other=0.0)
                acc += tl.dot(w, x, input_precision=PRECISION) * scale[:, None]
            else:
                acc = tl.dot(w, x, acc, input_precision=PRECISION)
    if SCALES:
        acc *= tl.load(scale_ptr + outs, mask=is_out, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_ptr + outs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if PAIRED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, BLOCK_N, BLOCK_T]), (1, 2, 0)))
        acc = activate(gate, up, KIND)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = target[None, :].to(tl.int64) * n + own[:, None]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=(own < n)[:, None] & is_row[None, :])


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
