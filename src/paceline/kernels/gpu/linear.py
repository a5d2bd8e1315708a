"""Products of few rows with a large matrix, fused with the operations around them in a decoder layer.

A pass over few tokens reads every weight once and does little arithmetic, so these kernels are built around wide weight
loads: one program computes a strip of outputs and streams its weights over all of K. The order of the sums does not depend on
the number of rows. Weights are dense, 8-bit (int8, float8_e4m3fn) with float32 scales, or 4-bit (`four_bit_tile.py`).

    linear            y = x W^T [+ bias] [+ residual]
    gate_up           silu(x G^T) * (x U^T)
    qkv_rotary_store  q, rotated; k, rotated, and v are stored in the paged cache

`normed.py` has the norm between them. A product of one part (`splits` of 1) sums K from first to last into one float32
accumulator, is rounded, and only then multiplied by the norm's factor or added to the residual stream: the bits are those of a
library's product with the same order of sums, followed by other kernels.

Programs may start while the previous kernel ends (programmatic dependent launch): they prefetch weights, which no kernel
writes, and wait before they access activations.
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor

from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import GROUP, QuantizedWeight
from paceline.kernels.gpu.launch import PDL
from paceline.kernels.gpu.linear_kernels import embed_kernel, linear_kernel, pair_kernel
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.tiles import Tile, four_bit_tile, tile_for, whole_blocks
from paceline.kernels.gpu.weight_arguments import weight_arguments

MAX_ROWS = 64
"""Most rows of dense weights of a narrow model, whose products take as long as their launches."""
_MAX_ROWS_WIDE = 32
_WIDE = 2048


def most_rows(width: int) -> int:
    """Most rows that these kernels compute in a model of dense weights with this hidden size. Larger products are not bound by
    the weights and use the vendor's library, whose bits are the same (`products.py`)."""
    return MAX_ROWS if width <= _WIDE else min(MAX_ROWS, _MAX_ROWS_WIDE)


def embed(ids: Tensor, table: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Normed]:
    """Rows `ids` [T] of table [V, D], and the same rows as `Normed` for the next norm."""
    assert ids.is_contiguous()
    rows, width = len(ids), table.shape[1]
    hidden, scaled = (torch.empty(rows, width, dtype=norm.dtype, device=table.device) for _ in range(2))
    squares = torch.empty(rows, 1, dtype=torch.int64, device=table.device)
    embed_kernel[(rows,)](
        ids, table, norm, hidden, scaled, squares, width, BLOCK=triton.next_power_of_2(width), num_warps=8, **PDL
    )
    return hidden, Normed(scaled, squares, eps)


def linear(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, K] -> [T, N], written to `out` if given."""
    if out is None:
        out = torch.empty(len(x), weight.shape[0], dtype=out_dtype or x.dtype, device=x.device)
    _linear(x, weight, out, bias=bias, tile=tile)
    return out


def add_linear(
    x: Tensor, weight: LinearWeight, residual: Tensor, next_norm: Tensor, eps: float, tile: Tile | None = None
) -> tuple[Tensor, Normed]:
    """h = residual + x W^T [T, N], and h as `Normed` for the next norm."""
    hidden, scaled = torch.empty_like(residual), torch.empty_like(residual)
    tile = _fit(tile, weight, x)
    strips = triton.cdiv(weight.shape[0], tile.outputs)
    squares = torch.empty(len(x), strips, dtype=torch.int64, device=x.device)
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
    x: Tensor,
    weight: LinearWeight,
    out: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    following: tuple[Tensor, Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> None:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tile = _fit(tile, weight, x)
    block_t = tile.rows_of(_tile_rows(weight, x))
    strips, blocks, splits = triton.cdiv(outputs, tile.outputs), triton.cdiv(rows, block_t), tile.splits
    given = weight_arguments(weight)
    linear_kernel[(strips, blocks, splits)](
        x, given.codes, given.scales, bias, residual, out, *(following or (None, None, None)),
        *_split_scratch(strips * blocks, tile, block_t, out.device),
        rows, outputs, inputs, x.stride(0), given.groups, given.padded_outputs,
        BLOCK_T=block_t, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs, SPLITS=splits,
        BIAS=bias is not None, RESIDUAL=residual is not None, NEXT=following is not None,
        SCALES=given.has_scales, GROUPED=given.is_grouped, FOUR_BIT=given.four_bit, KIND=given.kind,
        EVEN=outputs % tile.outputs == 0 and (given.four_bit > 0 or inputs % (tile.inputs * splits) == 0),
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
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
    (rows, inputs), pairs, parts = x.scaled.shape, weight.shape[0] // 2, x.squares.shape[1]
    tile = _fit(tile, weight, x.scaled, is_paired=True)
    block_t = tile.rows_of(_tile_rows(weight, x.scaled))
    strips, blocks, splits = triton.cdiv(2 * pairs, tile.outputs), triton.cdiv(rows, block_t), tile.splits
    given = weight_arguments(weight)
    pair_kernel[(strips, blocks, splits)](
        x.scaled, given.codes, given.scales, x.squares, bias, out, *rotary,
        *_split_scratch(strips * blocks, tile, block_t, out.device),
        rows, pairs, inputs, distance, x.scaled.stride(0), given.groups, given.padded_outputs, x.eps, parts, *heads,
        BLOCK_T=block_t, BLOCK_N=tile.outputs // 2, BLOCK_K=tile.inputs, PARTS=triton.next_power_of_2(parts),
        SPLITS=splits, ROTARY=rotary[0] is not None, BIAS=bias is not None,
        SCALES=given.has_scales, GROUPED=given.is_grouped, FOUR_BIT=given.four_bit, KIND=given.kind,
        EVEN=2 * pairs % tile.outputs == 0 and (given.four_bit > 0 or inputs % (tile.inputs * splits) == 0),
        PRECISION="ieee" if x.scaled.dtype is torch.float32 else "tf32",
        AHEAD=tile.ahead, num_warps=tile.warps, num_stages=tile.stages, **PDL,
    )  # fmt: skip


_COUNTERS: dict[tuple[torch.device, int], list[Tensor]] = {}


def _split_scratch(
    groups: int, tile: Tile, block_t: int, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """(sums of all splits, counters)."""
    if tile.splits == 1:
        return None, None
    size = groups * tile.splits * tile.outputs * block_t
    return torch.empty(size, dtype=torch.float32, device=device), _split_counters(groups, device)


def _split_counters(count: int, device: torch.device) -> Tensor:
    """Counters that are zero between launches. All kernels of a stream share one set, because a kernel counts only after the
    kernels before it have ended. Smaller sets are kept when a larger one is needed: captured graphs still use them."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _COUNTERS.setdefault((device, stream), [])
    if not known or len(known[-1]) < count:
        known.append(torch.zeros(max(4096, count), dtype=torch.int32, device=device))
    return known[-1]


def _tile_rows(weight: LinearWeight, x: Tensor) -> int:
    """Rows that a tile is chosen for. Products of float32 do not use the tensor cores, and large ones take minutes to compile.
    Weights with groups need registers for the sums of a group, which tiles of more than 64 rows leave no room for."""
    if isinstance(weight, FourBitWeight):
        return len(x) if x.dtype is not torch.float32 else min(len(x), 16)
    return min(len(x), MAX_ROWS) if x.dtype is torch.float32 or _is_grouped(weight) else len(x)


def _is_grouped(weight: LinearWeight) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.scales.shape[1] > 1


def _fit(tile: Tile | None, weight: LinearWeight, x: Tensor, is_paired: bool = False) -> Tile:
    assert not isinstance(weight, PackedWeight)
    rows = _tile_rows(weight, x)
    if isinstance(weight, FourBitWeight):
        return whole_blocks(tile or four_bit_tile(rows, *weight.shape, is_paired), weight.shape[1])
    tile = tile or tile_for(rows, *weight.shape, weight.values.element_size(), is_paired)
    return replace(tile, inputs=GROUP) if _is_grouped(weight) else tile  # a tile has one scale per output
