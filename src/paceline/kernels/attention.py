"""Attention of the rows of one pass over the paged cache, as `AttentionLayout` describes it.

A sliding `window` limits a row to its last visible tokens, itself included. `sinks` add a score without a value to the softmax
of each head. A `cap` turns a score s into cap * tanh(s / cap). Sums run over the visible tokens in order, not over cache
positions: in the native kernel, a node of a tree has the same bits as the same path in a chain.
"""

import torch
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.quantized import take

HEAD_MULTIPLE = 16
"""Widest vector of a native build; a head must be a multiple of it."""


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,  # [H]
    cap: float | None = None,
) -> Tensor:
    """q [T, H, hd], caches [blocks, BLOCK_SIZE, KV, hd], which contain the keys and values of these rows -> [T, H * hd]."""
    rows, heads, width = q.shape
    if width % HEAD_MULTIPLE or not native.supports(q) or key_cache.dtype is not torch.float32:
        return paged_attention_reference(q, key_cache, value_cache, layout, scale, window, sinks, cap)
    starts, context_lens, tables, ancestors = layout.starts, layout.context_lens, layout.block_tables, layout.ancestors
    assert starts.dtype is context_lens.dtype is tables.dtype is torch.int32
    assert tables.is_contiguous()
    assert q.is_contiguous()
    assert value_cache.dtype is torch.float32
    assert sinks is None or sinks.dtype is torch.float32
    out = torch.empty(rows, heads * width)
    native.library().for_rows(rows).paceline_attention(  # type: ignore[union-attr]  # supports() checked it
        q.data_ptr(),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        out.data_ptr(),
        starts.data_ptr(),
        context_lens.data_ptr(),
        tables.data_ptr(),
        None if ancestors is None else ancestors.data_ptr(),
        None,
        None if sinks is None else sinks.data_ptr(),
        rows,
        context_lens.shape[0],
        tables.shape[1],
        heads,
        key_cache.shape[2],
        width,
        window or 0,
        scale,
        cap or 0.0,
    )
    return out


def paged_attention_reference(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    layout: AttentionLayout,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    heads, kv_heads, width = q.shape[1], key_cache.shape[2], q.shape[2]
    starts, contexts = layout.starts.tolist(), layout.context_lens.tolist()
    outputs = []
    for s, context in enumerate(contexts):
        rows = slice(starts[s], starts[s + 1])
        length = context + starts[s + 1] - starts[s]
        blocks = layout.block_tables[s, : -(-length // BLOCK_SIZE)].long()
        keys = take(key_cache, blocks).view(-1, kv_heads, width)[:length].float()  # [L, KV, hd]
        values = take(value_cache, blocks).view(-1, kv_heads, width)[:length].float()
        queries = q[rows].float().unflatten(1, (kv_heads, heads // kv_heads))  # [R, KV, G, hd]
        scores = torch.einsum("rkgd,lkd->kgrl", queries, keys) * scale
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        ancestors = None if layout.ancestors is None else layout.ancestors[rows]
        scores = scores.masked_fill(~_visible(context, length, ancestors, window, q.device), float("-inf"))
        if sinks is not None:
            ends = sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
            scores = torch.cat((scores, ends), -1)
        out = torch.einsum("kgrl,lkd->rkgd", scores.softmax(-1)[..., :length], values)
        outputs.append(out.flatten(1).to(q.dtype))
    return torch.cat(outputs) if outputs else q.new_empty(0, heads * width)


def _visible(context: int, length: int, ancestors: Tensor | None, window: int | None, device: torch.device) -> Tensor:
    """[R, L] bool: the logical indices that each row of the sequence attends to."""
    own = torch.arange(length - context, device=device)
    sees = own <= own.unsqueeze(1)  # [R, R]
    if ancestors is not None:
        # shifting an int64 by 64 or more is undefined; only chains, whose mask is -1, have more than 64 rows
        sees &= (ancestors.unsqueeze(1) >> own.clamp(max=63) & 1).bool() | (ancestors == -1).unsqueeze(1)
    visible = torch.cat((sees.new_ones(len(own), context), sees), 1)
    if window is not None:
        behind = visible.sum(1, keepdim=True) - visible.cumsum(1)
        visible &= behind < window
    return visible
