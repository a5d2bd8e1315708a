"""Causal attention of one long prompt, or of a long chunk of it, over keys and values in one contiguous piece.

The kernel of paged attention (`kernels.py`) looks up the cache block of every key. For thousands of rows it is faster to
gather the keys and values of the sequence once per layer: then the tensor memory accelerator loads whole tiles of them. A
chunk of almost `PIECE` rows attends to whole pieces of keys by cuDNN; the kernel here computes the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import PIECE, LongPrompt, capability
from paceline.kernels.gpu.attention.pieces import add_piece, attend_piece, uses_pieces

LOG2_E = tl.constexpr(1.4426950408889634)
_ROWS = 128
"""Rows of one head that a program computes."""
_KEYS = 128
"""Keys that it loads at once."""


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
    first, num_rows, context = prompt.first_row, prompt.num_rows, prompt.context_len
    blocks = block_tables[prompt.sequence, : -(-(context + num_rows) // BLOCK_SIZE)]
    if not uses_pieces(num_rows, context, q.device):
        keys, values = (_gathered(cache, blocks, context + num_rows) for cache in (key_cache, value_cache))
        prompt_attention(q, keys, values, first, num_rows, scale, out)
        return
    whole = context // PIECE * PIECE  # keys in whole pieces before the first row
    keys, values = (_gathered(cache, blocks, context + num_rows, context + PIECE) for cache in (key_cache, value_cache))
    rows = q.new_zeros(PIECE, *q.shape[1:])
    rows[:num_rows] = q[first : first + num_rows]
    if whole == context:
        part, sums = attend_piece(rows, keys[whole:], values[whole:], scale, is_causal=True)
        out[first : first + num_rows].view(num_rows, *q.shape[1:]).copy_(part[:num_rows])
    else:
        sums, end = q.new_empty(q.shape[1], PIECE, dtype=torch.float32), context + num_rows
        prompt_attention(q, keys[whole:end], values[whole:end], first, num_rows, scale, out, sums)
    for begin in range(0, whole, PIECE):
        piece = slice(begin, begin + PIECE)
        part, part_sums = attend_piece(rows, keys[piece], values[piece], scale, is_causal=False)
        add_piece(out, sums, part, part_sums, first, num_rows)


def _gathered(cache: Tensor, blocks: Tensor, length: int, size: int = 0) -> Tensor:
    """The first slots [length, KV, hd] of these blocks. Zeros follow up to `size`, since slots after the end may hold NaN."""
    slots = torch.empty(max(size, len(blocks) * BLOCK_SIZE), *cache.shape[2:], dtype=cache.dtype, device=cache.device)
    torch.index_select(cache, 0, blocks, out=slots[: len(blocks) * BLOCK_SIZE].view(-1, *cache.shape[1:]))
    slots[length:] = 0
    return slots[: max(size, length)]


def prompt_attention(
    q: Tensor,  # [T, H, hd], possibly a view of [T, (H + 2 KV) hd]
    keys: Tensor,  # [L, KV, hd], contiguous
    values: Tensor,  # [L, KV, hd], contiguous
    first_row: int,
    num_rows: int,
    scale: float,
    out: Tensor,  # [T, H * hd]
    sums: Tensor | None = None,  # [H, num_rows or more] float32
) -> None:
    """Write the rows `first_row` to `first_row + num_rows` of `out`. They are the last of `L` tokens, and each attends to all
    tokens up to itself. `sums` receives the natural logarithms of the sums of every row."""
    heads, width = q.shape[1], q.shape[2]
    length, kv_heads = keys.shape[0], keys.shape[1]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert q.stride(2) == 1
    assert q.stride(1) == width
    queries = TensorDescriptor(q, [first_row + num_rows, heads * width], [q.stride(0), 1], [_ROWS, width])
    shape, strides, box = [length, kv_heads * width], [kv_heads * width, 1], [_KEYS, width]
    _prompt_attention[(triton.cdiv(num_rows, _ROWS), heads)](
        queries,
        TensorDescriptor(keys, shape, strides, box),
        TensorDescriptor(values, shape, strides, box),
        out,
        sums,
        first_row,
        num_rows,
        length - num_rows,
        out.stride(0),
        0 if sums is None else sums.stride(0),
        scale * LOG2_E.value,
        GROUP=heads // kv_heads,
        WIDTH=width,
        ROWS=_ROWS,
        KEYS=_KEYS,
        SUMS=sums is not None,
        num_warps=8,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["first_row", "num_rows", "context"])
def _prompt_attention(
    queries,
    keys,
    values,
    out,
    sums,
    first_row,
    num_rows,
    context,  # tokens before the first row
    out_stride,
    sums_stride,
    scale,  # log2(e) included
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SUMS: tl.constexpr,
):
    row_0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS  # tiles with the most keys start first
    head = tl.program_id(1)
    query = queries.load([first_row + row_0, head * WIDTH])
    column = head // GROUP * WIDTH
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    whole_end = (context + row_0 + 1) // KEYS * KEYS  # all rows attend to the keys before it
    end = context + tl.minimum(row_0 + ROWS, num_rows)
    total, top, norm = _attend(
        total, top, norm, query, keys, values, column, 0, whole_end, context + row_0, scale, ROWS, KEYS, False
    )
    total, top, norm = _attend(
        total, top, norm, query, keys, values, column, whole_end, end, context + row_0, scale, ROWS, KEYS, True
    )
    row = row_0 + tl.arange(0, ROWS)
    at = (first_row + row).to(tl.int64)[:, None] * out_stride + head * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at, (total / norm[:, None]).to(out.dtype.element_ty), mask=(row < num_rows)[:, None])
    if SUMS:
        tl.store(sums + head * sums_stride + row, (top + tl.log2(norm)) / LOG2_E, mask=row < num_rows)


@triton.jit
def _attend(
    total,
    top,
    norm,
    query,
    keys,
    values,
    column,
    begin,
    end,
    first_position,
    scale,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from begin to end. Without MASKED: whole tiles that all rows attend to."""
    for index in tl.range(begin, end, KEYS):
        scores = tl.dot(query, keys.load([index, column]).T)  # [ROWS, KEYS]
        if MASKED:
            position = first_position + tl.arange(0, ROWS)
            scores = tl.where(index + tl.arange(0, KEYS)[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)  # every row attends to the first key
        weights = tl.exp2(tl.fma(scores, scale, -new_top[:, None]))
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.sum(weights, 1)
        total = tl.dot(weights.to(query.dtype), values.load([index, column]), total * decay[:, None])
        top = new_top
    return total, top, norm
