"""The kernel of paged attention; `paged.py` launches it.

A program computes one tile of rows of one sequence, one key-value head and one part of the context. If a context is split, each
program stores its unnormalised output, maximum and sum in scratch memory. The last to finish combines them in a fixed order, so
that the result does not depend on which program it is. Sums are float32; scores are in base 2.
"""

import triton
import triton.language as tl

from paceline.kernels.gpu.launch import gdc_launch, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
_ONES = tl.constexpr(8)  # columns of the narrowest product


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "first_row", "least_rows", "most_rows"],
    do_not_specialize_on_alignment=["block_tables"],
)
def attention_kernel(
    q,
    key_cache,
    value_cache,
    out,
    starts,
    context_lens,
    block_tables,
    ancestors,
    sinks,
    partial,
    sums,
    counters,
    num_sequences,
    q_stride,
    table_stride,
    first_row,
    least_rows,
    most_rows,
    scale,  # log2(e) included
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SINKS: tl.constexpr,
    PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # HAZARD: no load before the wait; even the lengths are written by an earlier kernel
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence, start, num_rows, row_0 = _rows_of(tile, starts, num_sequences, most_rows, ROWS, SEARCH)
    context = tl.load(context_lens + sequence)
    if (row_0 >= num_rows) | (num_rows < least_rows) | (num_rows > most_rows):
        return

    num_parts, part_begin, whole_end, part_end = _part_of(
        split, context, first_row + row_0, first_row + tl.minimum(row_0 + ROWS, num_rows), WINDOW, TREE, KEYS, SPLITS
    )
    if split >= num_parts:
        return

    member = tl.arange(0, TILE)  # row-major, with the heads of the group innermost
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

    table = block_tables if SEARCH == 1 else block_tables + sequence.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * WIDTH, value_cache + kv_head * WIDTH
    total = tl.zeros([TILE, PADDED], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    norm = tl.zeros([TILE, _ONES], tl.float32)  # all columns are equal
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
        group_index = tile * KV_HEADS + kv_head
        slot = (group_index * SPLITS + split).to(tl.int64)
        within = member[:, None] * WIDTH + lane[None, :]
        tl.store(partial + slot * TILE * WIDTH + within, total, mask=is_kept)
        tl.store(sums + slot * 2 * TILE + member, top, mask=is_live)
        tl.store(sums + slot * 2 * TILE + TILE + member, norm, mask=is_live)
        tl.debug_barrier()  # all threads have stored before the counter is incremented
        if tl.atomic_add(counters + group_index, 1, sem="acq_rel") != num_parts - 1:
            return
        tl.store(counters + group_index, 0)
        total, norm, top = _join(
            partial + (group_index * SPLITS).to(tl.int64) * TILE * WIDTH, sums + (group_index * SPLITS).to(tl.int64) * 2 * TILE,
            num_parts, is_live, WIDTH, PADDED, TILE, SPLITS,
        )  # fmt: skip
    if SINKS:
        # After all keys, so that its place in the sum does not depend on the parts of the context
        sink = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32)
        norm += tl.exp2(tl.minimum(tl.fma(sink, LOG2_E, -top), 120.0))
    result = total / tl.where(norm > 0.0, norm, 1.0)[:, None]
    at = (position * (KV_HEADS * GROUP * WIDTH) + head * WIDTH)[:, None] + lane[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=is_kept)


@triton.jit
def _rows_of(tile, starts, num_sequences, most_rows, ROWS: tl.constexpr, SEARCH: tl.constexpr):
    """(sequence, its first row in the pass, its number of rows, its first row in this tile). The tiles of sequence s begin at
    starts[s] // ROWS + s. SEARCH 0: every sequence has `most_rows` rows."""
    if SEARCH == 0:
        each = tl.cdiv(most_rows, ROWS)
        return tile // each, tile // each * most_rows, most_rows, tile % each * ROWS
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
    row_0,  # first row of the tile, in its sequence
    row_end,  # end of its rows
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """(number of parts of the context; of part `split`: its begin, the end of the keys that all rows attend to, its end)."""
    end = context + row_end  # end of the keys that any row of the tile attends to
    first = 0
    if WINDOW > 0:
        # Rows of the pass that the first row attends to: at least itself; in a chain, all earlier ones
        first = tl.maximum(context + (1 if TREE else row_0 + 1) - WINDOW, 0) // KEYS * KEYS
    share = KEYS  # keys per part; parts begin at multiples of it, whatever the rows of the pass
    while SPLITS * share < end - first // share * share:
        share *= 2
    first = first // share * share
    num_parts = tl.cdiv(end - first, share)  # a short context has fewer parts than programs
    part_begin = first + split * share
    part_end = tl.minimum(part_begin + share, end)
    whole_end = part_begin
    if WINDOW == 0:
        # All rows attend to keys before this; part_begin <= whole_end, and both are multiples of KEYS
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
    """Add the keys from begin to end. Without MASKED: whole chunks that all rows attend to."""
    lane = tl.arange(0, PADDED)
    ones = tl.full([KEYS, _ONES], 1.0, tl.float32).to(query.dtype)
    for chunk in range(begin, end, KEYS):
        index = chunk + tl.arange(0, KEYS)
        if MASKED:
            # Slots after the end may hold NaN, and 0 * NaN is NaN: they are not read
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
        level = tl.where(
            new_top == float("-inf"), 0.0, new_top
        )  # a row without visible keys so far: avoids -inf - -inf
        # Explicit: the compiler would fuse this only in the unmasked loop
        weights = tl.exp2(tl.fma(scores, scale, -level[:, None])).to(query.dtype)
        decay = tl.exp2(top - level)[:, None]
        # A product sums in a fixed order; tl.sum depends on the threads
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
    """(total, norm, highest top) of all parts: the sums of 2^(top - highest top) times each part's. Loads bypass L1: other
    programs wrote the parts."""
    AT_ONCE: tl.constexpr = max(1, 64 // TILE)  # parts loaded at once, as registers allow
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
    return total, norm, level


@triton.jit
def _visible(own, row, lineage, WINDOW: tl.constexpr, TREE: tl.constexpr):
    """[TILE, KEYS] bool: whether `row` attends to the key of row `own` of its sequence; `own` < 0 is in the context."""
    own, row = own[None, :], row[:, None]
    visible = own <= row
    behind = row - own  # visible tokens after this one
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
    """Number of set bits of a uint64, as int32."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)
