"""The kernel that ends the attention of token trees; `paged.py` launches it after the kernel of paged attention.

A node has the bits of plain decoding at its position, where its ancestors are the keys before it. In the cache they are not:
the nodes of a tree follow the context in the order of the tree. The kernel reads the rest of the context and then, in order of
position, the ancestors of every node: 16 keys of each node side by side, of which a node attends to its own. The others are
exact zeros between two steps of the tensor cores, so that they change nothing. The highest score of a chunk is found first.
"""

import triton
import triton.language as tl

from paceline.kernels.gpu.attention.order import (
    CHUNK_KEYS,
    GROUP_KEYS,
    PART_KEYS,
    STEP_KEYS,
    add_chunk,
    add_weights,
    empty_state,
    finish,
    join,
    raise_top,
    squash,
)
from paceline.kernels.gpu.attention.states import join_stored, load_slots, node_position, nth_bit, rows_of
from paceline.kernels.gpu.launch import gdc_launch, gdc_wait


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "first_row", "least_rows", "most_rows", "slot_stride"],
    do_not_specialize_on_alignment=["block_tables"],
)
def tree_kernel(
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
    num_sequences,
    q_stride,
    table_stride,
    first_row,
    least_rows,
    most_rows,
    slot_stride,
    scale,  # log2(e) and the cap included
    squashing,  # what `squash` multiplies scores by
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    PAGE: tl.constexpr,
    SEARCH: tl.constexpr,
    TILE: tl.constexpr,
    NODES: tl.constexpr,  # whose keys are read at once
    IS_SPLIT: tl.constexpr,  # whether the programs of the context stored every group
    PDL: tl.constexpr,
):
    ROWS: tl.constexpr = TILE // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence, start, num_rows, row_0 = rows_of(tile, starts, num_sequences, most_rows, ROWS, SEARCH)
    if (row_0 >= num_rows) | (num_rows < least_rows) | (num_rows > most_rows):
        return
    if tl.load(ancestors + start) == -1:  # a chain
        return
    context = tl.load(context_lens + sequence)

    member, lane = tl.arange(0, TILE), tl.arange(0, PADDED)
    row = row_0 + member // GROUP
    is_live = (member < ROWS * GROUP) & (row < num_rows)
    is_kept = is_live[:, None] & (lane < WIDTH)[None, :]
    head = kv_head * GROUP + member % GROUP
    position = (start + row).to(tl.int64)
    query = tl.load(q + (position * q_stride + head * WIDTH)[:, None] + lane[None, :], mask=is_kept, other=0.0)
    at = position * (KV_HEADS * GROUP) + head
    own = node_position(context, first_row + row, tl.load(ancestors + position, mask=is_live, other=-1))
    own = tl.where(is_live, own, -1)  # attends to nothing
    end = tl.max(own, 0) + 1
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context + 1 - WINDOW, 0) // CHUNK_KEYS * CHUNK_KEYS

    # The states of the whole parts before: groups, and the parts of one that is not whole
    before = context // PART_KEYS * PART_KEYS
    has_states = before > first
    all_top, all_norm, all_total = empty_state(TILE, PADDED)
    group_top, group_norm, group_total = empty_state(TILE, PADDED)
    if has_states:
        num_groups = tl.cdiv(before, GROUP_KEYS)
        group_0 = first // GROUP_KEYS
        if not IS_SPLIT:  # slots 0 and 1: all groups but the last, and the last one
            group_0, num_groups = 0, before * 0 + 2
        num_whole = num_groups - 1 + (before % GROUP_KEYS == 0).to(tl.int32)
        all_top, all_norm, all_total = join_stored(
            all_top, all_norm, all_total, states, sums, at, is_live, group_0, num_whole - group_0, slot_stride, scale,
            TILE, WIDTH, PADDED,
        )  # fmt: skip
        group_top, group_norm, group_total = join_stored(
            group_top, group_norm, group_total, states, sums, at, is_live, num_whole, num_groups - num_whole,
            slot_stride, scale, TILE, WIDTH, PADDED,
        )  # fmt: skip

    table = block_tables if SEARCH == 1 else block_tables + sequence.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * WIDTH, value_cache + kv_head * WIDTH
    top, norm, total = empty_state(TILE, PADDED)
    begin = tl.maximum(before, first)
    for chunk in range(begin, context // CHUNK_KEYS * CHUNK_KEYS, CHUNK_KEYS):
        index = chunk + tl.arange(0, CHUNK_KEYS)
        key, value = load_slots(keys, values, table, index, index < context, query.dtype, KV_HEADS, WIDTH, PADDED, PAGE)
        scores = _scores(query, key, index[None, :], own, index[None, :] < context, squashing, WINDOW, CAPPED)
        top, norm, total = add_chunk(top, norm, total, scores, value, scale)

    in_chunk = tl.arange(0, CHUNK_KEYS)
    column = tl.arange(0, NODES * STEP_KEYS)
    stored = context // STEP_KEYS * STEP_KEYS  # from here on, steps hold keys of the tree
    for chunk in range(context // CHUNK_KEYS * CHUNK_KEYS, end, CHUNK_KEYS):
        if (chunk % PART_KEYS == 0) & (chunk > before):
            group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
            top, norm, total = empty_state(TILE, PADDED)
        if (chunk % GROUP_KEYS == 0) & (chunk > before):
            all_top, all_norm, all_total = join(all_top, all_norm, all_total, group_top, group_norm, group_total, scale)
            group_top, group_norm, group_total = empty_state(TILE, PADDED)
        index = chunk + in_chunk
        key, value = load_slots(keys, values, table, index, index < stored, query.dtype, KV_HEADS, WIDTH, PADDED, PAGE)
        scores = _scores(query, key, index[None, :], own, index[None, :] < stored, squashing, WINDOW, CAPPED)
        highest = tl.max(scores, 1)
        step_0 = tl.maximum(chunk, stored)
        num_steps = (tl.minimum(chunk + CHUNK_KEYS, end) - step_0 + STEP_KEYS - 1) // STEP_KEYS
        TURNS: tl.constexpr = (ROWS + NODES - 1) // NODES
        for turn in tl.range(0, num_steps * TURNS, num_stages=1):
            node = row_0 + turn % TURNS * NODES + column // STEP_KEYS
            place = step_0 + turn // TURNS * STEP_KEYS + column % STEP_KEYS
            own_key, _, is_own = _ancestors(
                keys, values, table, ancestors, start, num_rows, context, first_row, node, place, row, query.dtype,
                KV_HEADS, WIDTH, PADDED, PAGE,
            )  # fmt: skip
            own_scores = _scores(query, own_key, place[None, :], own, is_own, squashing, WINDOW, CAPPED)
            highest = tl.maximum(highest, tl.max(own_scores, 1))
        top, norm, total = raise_top(top, norm, total, highest, scale)
        norm, total = add_weights(top, norm, total, scores, value, scale)
        for turn in tl.range(0, num_steps * TURNS, num_stages=1):
            node = row_0 + turn % TURNS * NODES + column // STEP_KEYS
            place = step_0 + turn // TURNS * STEP_KEYS + column % STEP_KEYS
            own_key, own_value, is_own = _ancestors(
                keys, values, table, ancestors, start, num_rows, context, first_row, node, place, row, query.dtype,
                KV_HEADS, WIDTH, PADDED, PAGE,
            )  # fmt: skip
            own_scores = _scores(query, own_key, place[None, :], own, is_own, squashing, WINDOW, CAPPED)
            norm, total = add_weights(top, norm, total, own_scores, own_value, scale)

    group_top, group_norm, group_total = join(group_top, group_norm, group_total, top, norm, total, scale)
    all_top, all_norm, all_total = join(all_top, all_norm, all_total, group_top, group_norm, group_total, scale)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head, mask=is_live, other=0.0).to(tl.float32)
    result = finish(all_top, all_norm, all_total, sink, scale, SINKS)
    tl.store(out + (at * WIDTH)[:, None] + lane[None, :], result.to(out.dtype.element_ty), mask=is_kept)


@triton.jit
def _scores(query, key, place, own, is_own, squashing, WINDOW: tl.constexpr, CAPPED: tl.constexpr):
    """Scores of keys at the positions `place` [1, N]; -inf where a row does not attend to them."""
    is_visible = is_own & (place <= own[:, None])
    if WINDOW > 0:
        is_visible &= own[:, None] - place < WINDOW
    scores = squash(tl.dot(query, tl.trans(key), input_precision="ieee"), squashing, CAPPED)
    return tl.where(is_visible, scores, float("-inf"))


@triton.jit
def _ancestors(
    keys,
    values,
    table,
    ancestors,
    start,
    num_rows,
    context,
    first_row,
    node,  # [N] rows of the sequence
    place,  # [N] positions
    row,  # [TILE]
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(keys, values, [TILE, N] whether they are those of the row): the key at `place` before or of `node`."""
    is_node = node < num_rows
    lineage = tl.load(ancestors + (start + node).to(tl.int64), mask=is_node, other=-1)
    depth = place - context  # among the nodes of the tree
    is_stored = is_node & (place <= node_position(context, first_row + node, lineage))
    bit = tl.where(lineage == -1, depth, nth_bit(lineage.to(tl.uint64), tl.maximum(depth, 0)))
    index = tl.where(depth < 0, place, context + bit)
    key, value = load_slots(keys, values, table, index, is_stored, dtype, KV_HEADS, WIDTH, PADDED, PAGE)
    return key, value, (row[:, None] == node[None, :]) & is_stored[None, :]
