"""Paged attention for decode, verification, token trees and chunked prefill: one launch, whatever the pass holds.

A program computes one tile of rows of one sequence, one key-value head, one part of the context. Where a context is cut
into parts, each leaves its unnormalised output, maximum and sum in scratch, and the last to arrive joins them in order:
the result does not depend on which it was. Sums are float32; scores are kept in base 2.

A row's bits are the same whether it is decoded alone or verified in a chain of rows: chunks of keys and parts begin at fixed
places of the context, and no sum follows the order in which threads happen to hold its terms. Except in the tile in which
a context outgrows its parts, which are twice as long from then on: all rows of a tile are cut up as its last one is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.attention_plan import AttentionPlan
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.layout import BLOCK_SIZE

_LOG2_E = 1.4426950408889634
_ONES = tl.constexpr(8)  # the narrowest product there is


def paged_attention(
    q: Tensor,  # [T, H, hd], rows may lie apart, as in a view of [T, (H + 2 KV) hd]
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
) -> Tensor:
    """[T, H * hd], as `AttentionLayout` describes it. Rows from `starts[S]` on are left as they are. `first_row`: so many rows
    of each sequence's tree were computed by passes before, this one goes on after them."""
    rows, heads, width = q.shape
    kv_heads = key_cache.shape[2]
    assert rows == plan.num_rows
    assert len(context_lens) == plan.num_sequences
    assert q.stride(2) == 1
    assert q.stride(1) == width
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert block_tables.stride(1) == 1
    if out is None:
        out = torch.empty(rows, heads * width, dtype=q.dtype, device=q.device)
    _attention[(plan.num_tiles, kv_heads, plan.num_splits)](
        q,
        key_cache,
        value_cache,
        out,
        starts,
        context_lens,
        block_tables,
        q if ancestors is None else ancestors,
        plan.partial,
        plan.sums,
        plan.arrived,
        plan.num_sequences,
        q.stride(0),
        block_tables.stride(0),
        first_row,
        scale * _LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        WINDOW=window or 0,
        TREE=ancestors is not None,
        PAGE=BLOCK_SIZE,
        SEARCH=plan.search,
        TILE=plan.tile,
        KEYS=plan.tile_keys,
        SPLITS=plan.num_splits,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **PDL,
    )
    return out


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "first_row"], do_not_specialize_on_alignment=["block_tables"]
)
def _attention(
    q,
    key_cache,
    value_cache,
    out,
    starts,
    context_lens,
    block_tables,
    ancestors,
    partial,
    sums,
    arrived,
    num_sequences,
    q_stride,
    table_stride,
    first_row,
    scale,  # log2(e) included
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Nothing may move above the wait: even the lengths are written by a kernel of the same chain
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence, start, num_rows, row_0 = _rows_of(tile, starts, num_sequences, ROWS, SEARCH)
    context = tl.load(context_lens + sequence)
    if row_0 >= num_rows:
        return

    num_parts, part_begin, whole_end, part_end = _part_of(
        split, context, first_row + row_0, first_row + tl.minimum(row_0 + ROWS, num_rows), WINDOW, TREE, KEYS, SPLITS
    )
    if split >= num_parts:
        return

    member = tl.arange(0, TILE)  # row-major: heads of the group innermost
    lane = tl.arange(0, PADDED)
    row = row_0 + member // GROUP
    is_live = (member < ROWS * GROUP) & (row < num_rows)
    is_kept = is_live[:, None] & (lane < WIDTH)[None, :]
    head = kv_head * GROUP + member % GROUP
    position = (start + row).to(tl.int64)
    query = tl.load(q + (position * q_stride + head * WIDTH)[:, None] + lane[None, :], mask=is_kept, other=0.0)
    if TREE:
        lineage = tl.load(ancestors + position, mask=is_live, other=-1)
    else:
        lineage = row
    row += first_row

    table = block_tables + sequence.to(tl.int64) * table_stride if SEARCH > 1 else block_tables
    keys, values = key_cache + kv_head * WIDTH, value_cache + kv_head * WIDTH
    total = tl.zeros([TILE, PADDED], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    norm = tl.zeros([TILE, _ONES], tl.float32)  # every column the same
    total, top, norm = _attend(
        total, top, norm, query, keys, values, table, part_begin, whole_end, context, row, lineage, scale,
        KV_HEADS, WIDTH, PADDED, WINDOW, TREE, PAGE, KEYS, False,
    )  # fmt: skip
    total, top, norm = _attend(
        total, top, norm, query, keys, values, table, whole_end, part_end, context, row, lineage, scale,
        KV_HEADS, WIDTH, PADDED, WINDOW, TREE, PAGE, KEYS, True,
    )  # fmt: skip

    norm = tl.max(norm, 1)
    if SPLITS > 1 and num_parts > 1:
        meeting = tile * KV_HEADS + kv_head
        slot = (meeting * SPLITS + split).to(tl.int64)
        within = member[:, None] * WIDTH + lane[None, :]
        tl.store(partial + slot * TILE * WIDTH + within, total, mask=is_kept)
        tl.store(sums + slot * 2 * TILE + member, top, mask=is_live)
        tl.store(sums + slot * 2 * TILE + TILE + member, norm, mask=is_live)
        tl.debug_barrier()  # every thread's part is stored before one thread says so
        if tl.atomic_add(arrived + meeting, 1, sem="acq_rel") != num_parts - 1:
            return
        tl.store(arrived + meeting, 0)
        total, norm = _join(
            partial + (meeting * SPLITS).to(tl.int64) * TILE * WIDTH, sums + (meeting * SPLITS).to(tl.int64) * 2 * TILE,
            num_parts, is_live, WIDTH, PADDED, TILE, SPLITS,
        )  # fmt: skip
    result = total / tl.where(norm > 0.0, norm, 1.0)[:, None]
    at = (position * (KV_HEADS * GROUP * WIDTH) + head * WIDTH)[:, None] + lane[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_kept)


@triton.jit
def _rows_of(tile, starts, num_sequences, ROWS: tl.constexpr, SEARCH: tl.constexpr):
    """(sequence, its first row in the pass, how many it has, the first of them in the tile); sequence s owns the tiles from
    starts[s] // ROWS + s on."""
    sequence = 0
    if SEARCH > 1:
        each = tl.arange(0, SEARCH)
        first_tiles = tl.load(starts + each, mask=each < num_sequences, other=1 << 30) // ROWS + each
        sequence = tl.sum((first_tiles <= tile).to(tl.int32), 0) - 1
    start = tl.load(starts + sequence)
    num_rows = tl.load(starts + sequence + 1) - start
    return sequence, start, num_rows, (tile - (start // ROWS + sequence)) * ROWS


@triton.jit
def _part_of(
    split,
    context,
    row_0,  # the tile's first row, counted in its sequence
    row_end,  # past its last
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(parts of the context, then of part `split`: its begin, the end of what every row sees, its end)."""
    end = context + row_end  # past the last key that any row of the tile sees
    first = 0
    if WINDOW > 0:
        # Own rows that the first row sees: at least itself, in a chain every earlier one
        first = tl.maximum(context + (1 if TREE else row_0 + 1) - WINDOW, 0) // KEYS * KEYS
    share = KEYS  # keys of a part, which begins at a multiple of it whatever the rows of the pass
    while SPLITS * share < end - first // share * share:
        share *= 2
    first = first // share * share
    num_parts = tl.cdiv(end - first, share)  # a short context has fewer parts than there are programs
    part_begin = first + split * share
    part_end = tl.minimum(part_begin + share, end)
    whole_end = part_begin
    if WINDOW == 0:
        # Keys before this are seen by every row; part_begin <= whole_end, and both are whole chunks
        whole_end = (context + (0 if TREE else row_0 + 1)) // KEYS * KEYS
        whole_end = tl.maximum(tl.minimum(whole_end, part_end), part_begin)
    return num_parts, part_begin, whole_end, part_end


@triton.jit
def _attend(
    total,
    top,
    norm,
    query,
    keys,
    values,
    table,
    begin,
    end,
    context,
    row,
    lineage,
    scale,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One more stretch of keys, begin to end; not MASKED: whole chunks that every row sees."""
    lane = tl.arange(0, PADDED)
    ones = tl.full([KEYS, _ONES], 1.0, tl.float32).to(query.dtype)
    for chunk in range(begin, end, KEYS):
        index = chunk + tl.arange(0, KEYS)
        if MASKED:
            # Slots past the end may hold anything, and 0 * NaN is NaN: they are not read
            page = tl.load(table + index // PAGE, mask=index < end, other=0)
            is_kept = (index < end)[:, None] & (lane < WIDTH)[None, :]
        else:
            page = tl.load(table + index // PAGE)
            is_kept = tl.full([KEYS, 1], True, tl.int1) & (lane < WIDTH)[None, :]
        slot = page.to(tl.int64) * PAGE + index % PAGE
        at = (slot * (KV_HEADS * WIDTH))[:, None] + lane[None, :]  # [KEYS, PADDED]
        if MASKED or WIDTH != PADDED:
            key = tl.load(keys + at, mask=is_kept, other=0.0).to(query.dtype)
            value = tl.load(values + at, mask=is_kept, other=0.0).to(query.dtype)
        else:
            key = tl.load(keys + at).to(query.dtype)
            value = tl.load(values + at).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [TILE, KEYS]
        if MASKED:
            scores = tl.where(_visible(index - context, row, lineage, WINDOW, TREE), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        level = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet: no -inf - -inf
        # Left to itself, the compiler fuses this where nothing is masked and does not where something is
        weights = tl.exp2(tl.fma(scores, scale, -level[:, None])).to(query.dtype)
        decay = tl.exp2(top - level)[:, None]
        # A product adds up in one order; a sum follows the threads
        norm = tl.dot(weights, ones, norm * decay, input_precision="ieee")
        total = tl.dot(weights, value, total * decay, input_precision="ieee")
        top = new_top
    return total, top, norm


@triton.jit
def _join(
    partial,  # [num_parts, TILE, WIDTH]
    sums,  # [num_parts, 2, TILE]
    num_parts,
    is_live,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(total, norm) of all parts: sum of 2^(top - highest top) times each part's. Read past L1: other programs wrote it."""
    AT_ONCE: tl.constexpr = max(1, 64 // TILE)  # parts in flight, as many as registers hold
    EVERY: tl.constexpr = triton.next_power_of_2(SPLITS)
    member, lane = tl.arange(0, TILE), tl.arange(0, PADDED)
    part = tl.arange(0, EVERY)
    is_kept = (part < num_parts)[:, None] & is_live[None, :]
    at = part[:, None] * 2 * TILE + member[None, :]
    level = tl.max(tl.load(sums + at, mask=is_kept, other=float("-inf"), cache_modifier=".cg"), 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    norm = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE, PADDED], tl.float32)
    for first in range(0, num_parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            of_part = sums + (first + i) * 2 * TILE + member
            is_some = is_live & (first + i < num_parts)
            factor = tl.exp2(tl.load(of_part, mask=is_some, other=float("-inf"), cache_modifier=".cg") - level)
            norm += tl.load(of_part + TILE, mask=is_some, other=0.0, cache_modifier=".cg") * factor
            outputs = tl.load(
                partial + (first + i) * TILE * WIDTH + member[:, None] * WIDTH + lane[None, :],
                mask=is_some[:, None] & (lane < WIDTH)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            total += outputs * factor[:, None]
    return total, norm


@triton.jit
def _visible(own, row, lineage, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """[TILE, KEYS] bool: does `row` see the key of row `own` of its sequence, or of the context where `own` < 0?"""
    own, row = own[None, :], row[:, None]
    visible = own <= row
    behind = row - own  # tokens that the row sees after this one
    if TREE:
        is_chain = lineage[:, None] == -1
        bits = lineage.to(tl.uint64)[:, None]
        above = bits >> tl.minimum(tl.maximum(own, 0), 63).to(tl.uint64)  # bit 0 is `own` itself
        visible &= (own < 0) | is_chain | ((above & 1) == 1)
        if WINDOW > 0:
            on_path = tl.where(own < 0, _popcount(bits) - 1 - own, _popcount(above >> 1))
            behind = tl.where(is_chain, behind, on_path)
    if WINDOW > 0:
        visible &= behind < WINDOW
    return visible


@triton.jit
def _popcount(x):
    """Of uint64, as int32: sums of bits in ever wider fields."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)
