"""Paged attention for decode, verification, token trees and chunked prefill in one launch.

The bits of a row are the same in plain decoding and in the verification of a chain: chunks of keys and parts begin at fixed
indices of the context, and no sum depends on the order of threads. There is one exception: when a context outgrows its parts,
their length doubles, and all rows of a tile are split as its last row is.
"""

import torch
import triton
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.gpu.attention.kernels import LOG2_E, attention_kernel
from paceline.kernels.gpu.attention.plan import AttentionPlan
from paceline.kernels.gpu.launch import PDL


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
        _launch(
            q,
            key_cache,
            value_cache,
            starts,
            context_lens,
            block_tables,
            part,
            scale,
            ancestors,
            window,
            out,
            first_row,
            sinks,
        )
    return out


def _launch(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    plan: AttentionPlan,
    scale: float,
    ancestors: Tensor | None,
    window: int | None,
    out: Tensor,
    first_row: int,
    sinks: Tensor | None,
) -> None:
    heads, width, kv_heads = q.shape[1], q.shape[2], key_cache.shape[2]
    num_warps, num_stages = 4, 2
    if plan.tile > 64:
        # As registers and shared memory allow. A program that combines the parts of a context waits less with more warps
        is_large = plan.num_splits > 1 or width * q.element_size() > 256
        num_warps, num_stages = (8, 2) if is_large else (4, 3)
    attention_kernel[(plan.num_tiles, kv_heads, plan.num_splits)](
        q,
        key_cache,
        value_cache,
        out,
        starts,
        context_lens,
        block_tables,
        q if ancestors is None else ancestors,
        q if sinks is None else sinks,
        plan.partial,
        plan.sums,
        plan.counters,
        plan.num_sequences,
        q.stride(0),
        block_tables.stride(0),
        first_row,
        plan.least_rows,
        plan.most_rows,
        scale * LOG2_E.value,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        WINDOW=window or 0,
        TREE=ancestors is not None,
        SINKS=sinks is not None,
        PAGE=BLOCK_SIZE,
        SEARCH=plan.search,
        TILE=plan.tile,
        KEYS=plan.tile_keys,
        SPLITS=plan.num_splits,
        num_warps=num_warps,
        num_stages=num_stages,
        **PDL,
    )
