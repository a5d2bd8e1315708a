"""The kernel of paged attention; `paged.py` launches it. Sums follow `order.py`.

A program computes one tile of rows of one sequence and one key-value head, over a span of the keys: 256 keys, or a power of two
times as many. Spans begin at multiples of their length. A program leaves the states of its parts or, from spans of a whole
group on, of its groups in scratch memory. The last program of a group to finish joins its parts, and the last of all joins the
groups. The number of programs depends on the pass; the bits do not.

Rows of trees attend to whole parts of the context here, and to the rest in `trees.py`.
"""

import triton
import triton.language as tl

from paceline.kernels.gpu.attention.order import (
    CHUNK_KEYS,
    GROUP_KEYS,
    PART_KEYS,
    add_chunk,
    empty_state,
    finish,
    join,
    squash,
)
from paceline.kernels.gpu.attention.states import (
    join_stored,
    load_slots,
    load_whole_slots,
    node_position,
    others_run,
    rows_of,
    store_state,
)
from paceline.kernels.gpu.launch import gdc_launch, gdc_wait


@triton.jit(
    do_not_specialize=[
        "num_sequences", "table_stride", "first_row", "least_rows", "most_rows", "slot_stride", "group_slots",
    ],
    do_not_specialize_on_alignment=["block_tables"],
)  # fmt: skip
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
    states,
    sums,
    counters,
    num_sequences,
    q_stride,
    table_stride,
    first_row,
    least_rows,
    most_rows,
    slot_stride,  # rows times heads
    group_slots,  # slots of groups; those of parts follow
    scale,  # log2(e) and the cap included
    squashing,  # what `squash` multiplies scores by
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # HAZARD: no load before the wait; even the lengths are written by an earlier kernel
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence, start, num_rows, row_0 = rows_of(tile, starts, num_sequences, most_rows, ROWS, SEARCH)
    context = tl.load(context_lens + sequence)
    if (row_0 >= num_rows) | (num_rows < least_rows) | (num_rows > most_rows):
        return

    first_own = context + first_row + row_0  # position of the first row of the tile
    end = context + first_row + tl.minimum(row_0 + ROWS, num_rows)
    whole_end = (first_own + 1) // CHUNK_KEYS * CHUNK_KEYS  # all rows of a chain attend to all keys before it
    is_tree = False
    if TREE:
        is_tree = tl.load(ancestors + start) != -1
        if is_tree:
            end = context // PART_KEYS * PART_KEYS
            whole_end = end
            first_own = context
    first = 0  # of the keys that any row attends to
    if WINDOW > 0:
        first = tl.maximum(first_own + 1 - WINDOW, 0) // CHUNK_KEYS * CHUNK_KEYS
        whole_end = first
    span, origin = _span_of(first, end, SPLITS)
    begin, stop = tl.maximum(origin + split * span, first), tl.minimum(origin + (split + 1) * span, end)
    if (split >= tl.cdiv(end - origin, span)) | (begin >= stop):
        return
    whole_end = tl.maximum(tl.minimum(whole_end, stop), begin)

    member = tl.arange(0, TILE)  # row-major, with the heads of the group innermost
    lane = tl.arange(0, PADDED)
    row = row_0 + member // GROUP
    is_live = (member < ROWS * GROUP) & (row < num_rows)
    is_kept = is_live[:, None] & (lane < WIDTH)[None, :]
    head = kv_head * GROUP + member % GROUP
    position = (start + row).to(tl.int64)
    query = tl.load(q + (position * q_stride + head * WIDTH)[:, None] + lane[None, :], mask=is_kept, other=0.0)
    at = position * (KV_HEADS * GROUP) + head
    own = context + first_row + row  # positions
    if is_tree:
        own = node_position(context, first_row + row, tl.load(ancestors + position, mask=is_live, other=-1))

    table = block_tables if SEARCH == 1 else block_tables + sequence.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * WIDTH, value_cache + kv_head * WIDTH
    first_part = origin // PART_KEYS
    part_slot = group_slots - first_part
    top, norm, total = empty_state(TILE, PADDED)  # of the current part
    group_top, group_norm, group_total = empty_state(TILE, PADDED)  # of the parts of the current group
    all_top, all_norm, all_total = empty_state(TILE, PADDED)  # of groups, if one program has all
    if TILE >= 64:
        top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total = _attend(
            top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total,
            query, keys, values, table, begin, whole_end, begin, stop, own, span, part_slot, states, sums, at, is_live,
            slot_stride, scale, squashing, KV_HEADS, WIDTH, PADDED, WINDOW, CAPPED, PAGE, TILE, SPLITS, False,
        )  # fmt: skip
    else:
        whole_end = begin
    top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total = _attend(
        top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total,
        query, keys, values, table, whole_end, stop, begin, stop, own, span, part_slot, states, sums, at, is_live,
        slot_stride, scale, squashing, KV_HEADS, WIDTH, PADDED, WINDOW, CAPPED, PAGE, TILE, SPLITS, True,
    )  # fmt: skip

    group = (stop - 1) // GROUP_KEYS
    if SPLITS == 1:
        group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
        if is_tree:
            store_state(states, sums, at, is_live, all_top, all_norm, all_total, WIDTH, PADDED)
            last_slot = at + slot_stride
            store_state(states, sums, last_slot, is_live, group_top, group_norm, group_total, WIDTH, PADDED)
            return
    else:
        counter = counters + (tile * KV_HEADS + kv_head) * (group_slots + 1)
        programs = tl.cdiv(end - origin, span)
        if (span < GROUP_KEYS) & (programs > 1):
            part = at + (part_slot + (stop - 1) // PART_KEYS) * slot_stride
            store_state(states, sums, part, is_live, top, norm, total, WIDTH, PADDED)
            group_begin = tl.maximum(group * GROUP_KEYS, origin)
            group_end = tl.minimum(group * GROUP_KEYS + GROUP_KEYS, end)
            if others_run(counter + 1 + group, tl.cdiv(group_end - group_begin, span)):
                return
            part_0 = tl.maximum(group_begin, first) // PART_KEYS
            group_top, group_norm, group_total = join_stored(
                group_top, group_norm, group_total, states, sums, at, is_live, part_slot + part_0,
                tl.cdiv(group_end, PART_KEYS) - part_0, slot_stride, scale, TILE, WIDTH, PADDED,
            )  # fmt: skip
            programs = tl.cdiv(end, GROUP_KEYS) - origin // GROUP_KEYS  # that have a group to join
        else:
            group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
        group_0 = first // GROUP_KEYS
        num_groups = tl.cdiv(end, GROUP_KEYS) - group_0
        if is_tree | (num_groups > 1):
            slot = at + group * slot_stride
            store_state(states, sums, slot, is_live, group_top, group_norm, group_total, WIDTH, PADDED)
            if is_tree:
                return
            if others_run(counter, programs):
                return
            group_top, group_norm, group_total = empty_state(TILE, PADDED)
            all_top, all_norm, all_total = join_stored(
                all_top, all_norm, all_total, states, sums, at, is_live, group_0,
                num_groups, slot_stride, scale, TILE, WIDTH, PADDED,
            )  # fmt: skip
    # A join with the empty state changes nothing
    all_top, all_norm, all_total = join(all_top, all_norm, all_total, group_top, group_norm, group_total, scale)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32)
    result = finish(all_top, all_norm, all_total, sink, scale, SINKS)
    to = (at * WIDTH)[:, None] + lane[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=is_kept)


@triton.jit
def _span_of(first, end, SPLITS: tl.constexpr):
    """(keys of a span, begin of the first span): the shortest span of which `SPLITS` reach from `first` to `end`."""
    span = end * 0 + PART_KEYS
    if SPLITS == 1:
        span += 1 << 30
        return span, end * 0
    while SPLITS * span < end - first // span * span:
        span *= 2
    return span, first // span * span


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
    table,
    begin,
    end,
    span_begin,
    span_end,
    own,  # [TILE] positions of the rows
    span,
    part_slot,
    states,
    sums,
    at,
    is_live,
    slot_stride,
    scale,
    squashing,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the keys from begin to end. Without MASKED: whole chunks that all rows attend to. Parts and groups that end before a
    chunk are joined or stored, except for the last of a span."""
    for chunk in range(begin, end, CHUNK_KEYS):
        index = chunk + tl.arange(0, CHUNK_KEYS)
        if MASKED:
            key, value = load_slots(
                keys, values, table, index, index < span_end, query.dtype, KV_HEADS, WIDTH, PADDED, PAGE
            )
        else:
            key, value = load_whole_slots(keys, values, table, index, query.dtype, KV_HEADS, WIDTH, PADDED, PAGE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [TILE, CHUNK_KEYS]
        scores = squash(scores, squashing, CAPPED)
        if MASKED:
            is_visible = index[None, :] <= own[:, None]
            if WINDOW > 0:
                is_visible &= own[:, None] - index[None, :] < WINDOW
            scores = tl.where(is_visible, scores, float("-inf"))
        if (chunk % PART_KEYS == 0) & (chunk > span_begin):
            if SPLITS > 1:
                if span < GROUP_KEYS:
                    slot = at + (part_slot + chunk // PART_KEYS - 1) * slot_stride
                    store_state(states, sums, slot, is_live, top, norm, total, WIDTH, PADDED)
                else:
                    group_top, group_norm, group_total = join(
                        group_top, group_norm, group_total, top, norm, total, scale
                    )
                    if chunk % GROUP_KEYS == 0:
                        slot = at + (chunk // GROUP_KEYS - 1) * slot_stride
                        store_state(states, sums, slot, is_live, group_top, group_norm, group_total, WIDTH, PADDED)
                        group_top, group_norm, group_total = empty_state(TILE, PADDED)
            else:
                group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
                if chunk % GROUP_KEYS == 0:
                    all_top, all_norm, all_total = join(
                        all_top, all_norm, all_total, group_top, group_norm, group_total, scale
                    )
                    group_top, group_norm, group_total = empty_state(TILE, PADDED)
            top, norm, total = empty_state(TILE, PADDED)
        top, norm, total = add_chunk(top, norm, total, scores, value, scale)
    return top, norm, total, group_top, group_norm, group_total, all_top, all_norm, all_total
