"""Paged attention for decode, verification, token trees and chunked prefill in one launch, and one more for trees.

The bits of a row are those of plain decoding at its position, whatever the pass: see `order.py`.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.attention.kernels import attention_kernel
from paceline.kernels.gpu.attention.order import LOG2_E
from paceline.kernels.gpu.attention.plan import AttentionPlan, power_of_two
from paceline.kernels.gpu.attention.trees import tree_kernel
from paceline.kernels.gpu.launch import PDL

_NODES_AT_ONCE = 4
"""Nodes of a tree whose ancestors are read at once."""
_LATENCY_BOUND = 16
"""Tiles of rows times key-value heads up to which a program has eight warps."""
_MEMORY_BOUND = 256
"""The same from which a program of few rows has two."""


def paged_attention(
    q: Tensor,  # [T, H, hd], possibly a view of [T, (H + 2 KV) hd]
    key_cache: Tensor,  # [blocks, BLOCK_SIZE, KV, hd], any float type, float8 included
    value_cache: Tensor,
    starts: Tensor,  # [S + 1] int32
    context_lens: Tensor,  # [S] int32
    block_tables: Tensor,  # [S, W] int32
    plan: AttentionPlan,
    scale: float,
    ancestors: Tensor | None = None,  # [T] int64
    window: int | None = None,
    out: Tensor | None = None,  # [T, H * hd]
    first_row: int = 0,
    sinks: Tensor | None = None,  # [H]: one more score of each head, without a value
    cap: float | None = None,  # of scores
) -> Tensor:
    """Returns [T, H * hd], for the layout described by `AttentionLayout`. Rows from `starts[S]` on are not written. Earlier
    passes have computed the first `first_row` rows of each sequence's tree; this pass continues after them."""
    rows, heads, width = q.shape
    assert rows == plan.num_rows
    assert len(context_lens) == plan.num_sequences
    assert q.stride(2) == 1
    assert q.stride(1) == width
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    if out is None:
        out = torch.empty(rows, heads * width, dtype=q.dtype, device=q.device)
    for part in (plan,) if plan.few is None else (plan, plan.few):
        shared = dict(
            num_sequences=part.num_sequences,
            q_stride=q.stride(0),
            table_stride=block_tables.stride(0),
            first_row=first_row,
            least_rows=part.least_rows,
            most_rows=part.most_rows,
            slot_stride=part.num_rows * heads,
            scale=(scale if cap is None else cap) * LOG2_E.value,
            squashing=0.0 if cap is None else scale / cap,
            KV_HEADS=key_cache.shape[2],
            GROUP=heads // key_cache.shape[2],
            WIDTH=width,
            PADDED=triton.next_power_of_2(width),
            WINDOW=window or 0,
            SINKS=sinks is not None,
            CAPPED=cap is not None,
            PAGE=BLOCK_SIZE,
            SEARCH=part.search,
            **PDL,
        )
        tensors = (
            q, key_cache, value_cache, out, starts, context_lens, block_tables,
            q if ancestors is None else ancestors, q if sinks is None else sinks, part.states, part.sums,
        )  # fmt: skip
        num_warps, num_stages = _launch_sizes(part.tile, width, q.element_size(), part.num_tiles * key_cache.shape[2])
        attention_kernel[(part.num_tiles, key_cache.shape[2], part.num_splits)](
            *tensors,
            counters=part.counters,
            group_slots=part.group_slots,
            TREE=ancestors is not None,
            TILE=part.tile,
            SPLITS=part.num_splits,
            num_warps=num_warps,
            num_stages=num_stages,
            **shared,
        )
        if ancestors is not None:
            _end_trees(tensors, part, shared)
    return out


def _end_trees(tensors: tuple[Tensor, ...], plan: AttentionPlan, shared: dict[str, Any]) -> None:
    group = shared["GROUP"]
    tile = power_of_two(max(16, group))
    tile_rows = tile // group
    if plan.search == 0:
        num_tiles = plan.num_sequences * -(-plan.most_rows // tile_rows)
    else:
        num_tiles = plan.num_rows // tile_rows + plan.num_sequences
    tree_kernel[(num_tiles, shared["KV_HEADS"])](
        *tensors,
        TILE=tile,
        NODES=min(_NODES_AT_ONCE, power_of_two(tile_rows)),
        IS_SPLIT=plan.num_splits > 1,
        num_warps=4,
        num_stages=2,
        **shared,
    )


def _launch_sizes(tile: int, width: int, element_size: int, programs: int) -> tuple[int, int]:
    """(warps, stages) for this number of tiles times key-value heads, as registers and shared memory allow. The block of a key
    is read before the key, so that five stages hold the keys of two chunks and more.

    One sequence waits for latency: on an H200, 512 keys of heads of 128 take 10 us with eight warps and 14 with four. Many
    sequences wait for memory, which several programs of two warps on a multiprocessor use better.
    """
    row_bytes = width * element_size
    num_stages = 5 if row_bytes <= 256 else 3 if row_bytes <= 512 else 2
    if tile > 64 or tile * width > 8192 or (width >= 128 and programs <= _LATENCY_BOUND):
        return 8, num_stages
    if tile == 16 and width >= 128 and programs >= _MEMORY_BOUND:
        return 2, min(3, num_stages)
    return 4, num_stages
