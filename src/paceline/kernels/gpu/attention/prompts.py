"""Causal attention of one long prompt, or of a long chunk of it, over keys and values in one contiguous piece.

The kernel of paged attention (`kernels.py`) looks up the cache block of every key. For thousands of rows it is faster to
gather the keys and values of the sequence once per layer: then the tensor memory accelerator loads whole chunks of them. Sums
follow the same order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import LongPrompt, capability
from paceline.kernels.gpu.attention.order import (
    CHUNK_KEYS,
    GROUP_KEYS,
    LOG2_E,
    PART_KEYS,
    add_chunk,
    empty_state,
    finish,
    join,
)

_TILE = 128
"""Query vectors that a program computes: rows times the heads of a group."""


def supports_prompts(dtype: torch.dtype, key_cache: Tensor) -> bool:
    """Whether `prompt_attention` computes queries of this type over this cache on this device: Hopper and later ones of its
    kind."""
    is_supported = capability() // 10 in (9, 10) and dtype in (torch.bfloat16, torch.float16)
    return is_supported and key_cache.dtype is dtype and key_cache.shape[3] in (64, 128)


def attend_long_prompt(
    q: Tensor,  # [T, H, hd]
    key_cache: Tensor,  # [blocks, BLOCK_SIZE, KV, hd]
    value_cache: Tensor,
    block_tables: Tensor,  # [S, W] int32
    prompt: LongPrompt,
    scale: float,
    out: Tensor,  # [T, H * hd]
) -> None:
    """Write the rows of `prompt` in `out`. Its keys and values are in the cache."""
    length = prompt.context_len + prompt.num_rows
    blocks = block_tables[prompt.sequence, : -(-length // BLOCK_SIZE)]
    # Slots after the end may hold NaN: the descriptors of `prompt_attention` return zeros for them
    keys, values = (torch.index_select(cache, 0, blocks).flatten(0, 1)[:length] for cache in (key_cache, value_cache))
    prompt_attention(q, keys, values, prompt.first_row, prompt.num_rows, scale, out)


def prompt_attention(
    q: Tensor,  # [T, H, hd], possibly a view of [T, (H + 2 KV) hd]
    keys: Tensor,  # [L, KV, hd], contiguous
    values: Tensor,  # [L, KV, hd], contiguous
    first_row: int,
    num_rows: int,
    scale: float,
    out: Tensor,  # [T, H * hd]
) -> None:
    """Write the rows `first_row` to `first_row + num_rows` of `out`. They are the last of `L` tokens, and each attends to all
    tokens up to itself."""
    heads, width = q.shape[1], q.shape[2]
    length, kv_heads = keys.shape[0], keys.shape[1]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert q.stride(2) == 1
    assert q.stride(1) == width
    group = heads // kv_heads
    shape, strides, box = [length, kv_heads * width], [kv_heads * width, 1], [CHUNK_KEYS.value, width]
    _prompt_attention[(triton.cdiv(num_rows, _TILE // group), kv_heads)](
        q,
        TensorDescriptor(keys, shape, strides, box),
        TensorDescriptor(values, shape, strides, box),
        out,
        first_row,
        num_rows,
        length - num_rows,
        q.stride(0),
        out.stride(0),
        scale * LOG2_E.value,
        GROUP=group,
        WIDTH=width,
        TILE=_TILE,
        num_warps=8,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["first_row", "num_rows", "context"])
def _prompt_attention(
    q,
    keys,
    values,
    out,
    first_row,
    num_rows,
    context,  # tokens before the first row
    q_stride,
    out_stride,
    scale,  # log2(e) included
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // GROUP
    row_0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # tiles with the most keys start first
    kv_head = tl.program_id(1)
    member, lane = tl.arange(0, TILE), tl.arange(0, WIDTH)
    row = row_0 + member // GROUP
    is_live = ((member < ROWS * GROUP) & (row < num_rows))[:, None]
    position, column = (first_row + row).to(tl.int64), (kv_head * GROUP + member % GROUP) * WIDTH
    query = tl.load(q + (position * q_stride + column)[:, None] + lane[None, :], mask=is_live, other=0.0)

    whole_end = (context + row_0 + 1) // CHUNK_KEYS * CHUNK_KEYS  # all rows attend to the keys before it
    end = context + tl.minimum(row_0 + ROWS, num_rows)
    top, norm, total = empty_state(TILE, WIDTH)  # of the current part
    group_top, group_norm, group_total = empty_state(TILE, WIDTH)  # of the parts of the current group
    all_top, all_norm, all_total = empty_state(TILE, WIDTH)  # of the groups
    own = context + row
    top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total = _attend(
        top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total,
        query, keys, values, kv_head * WIDTH, 0, whole_end, own, scale, WIDTH, TILE, False,
    )  # fmt: skip
    top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total = _attend(
        top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total,
        query, keys, values, kv_head * WIDTH, whole_end, end, own, scale, WIDTH, TILE, True,
    )  # fmt: skip
    group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
    all_top, all_norm, all_total = join(all_top, all_norm, all_total, group_top, group_norm, group_total, scale)
    result = finish(all_top, all_norm, all_total, 0.0, scale, False)
    at = (position * out_stride + column)[:, None] + lane[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_live)


@triton.jit
def _attend(
    top,
    norm,
    total,
    group_top,
    group_norm,
    group_total,
    all_top,
    all_norm,
    all_total,
    query,
    keys,
    values,
    column,
    begin,
    end,
    own,
    scale,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from begin to end. Without MASKED: whole chunks that all rows attend to."""
    for chunk in tl.range(begin, end, CHUNK_KEYS):
        scores = tl.dot(query, keys.load([chunk, column]).T)
        if MASKED:
            index = chunk + tl.arange(0, CHUNK_KEYS)
            scores = tl.where(index[None, :] <= own[:, None], scores, float("-inf"))
        if (chunk % PART_KEYS == 0) & (chunk > 0):
            group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
            top, norm, total = empty_state(TILE, WIDTH)
            if chunk % GROUP_KEYS == 0:
                all_top, all_norm, all_total = join(
                    all_top, all_norm, all_total, group_top, group_norm, group_total, scale
                )
                group_top, group_norm, group_total = empty_state(TILE, WIDTH)
        top, norm, total = add_chunk(top, norm, total, scores, values.load([chunk, column]), scale)
    return top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total
