"""Where a program reads keys and values, and where it leaves the states of parts and groups for the programs that join them.

Scratch memory holds a state for every slot, row of the pass and head: the slots of groups, then those of parts. The states of a
row are written by the programs of its sequence and read by the program that joins them, whatever their tiles of rows.
"""

import triton
import triton.language as tl

from paceline.kernels.gpu.attention.order import NO_KEYS, join
from paceline.kernels.gpu.launch import IS_INTERPRETED, hashed

_ASM = tl.constexpr(not IS_INTERPRETED)


@hashed
@triton.jit
def rows_of(tile, starts, num_sequences, most_rows, ROWS: tl.constexpr, SEARCH: tl.constexpr):
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


@hashed
@triton.jit
def converted(values, dtype: tl.constexpr):
    """Values of a cache in the type that the tensor cores read.

    HAZARD: the compiler orders the products of a small tile by the width of the loads that its operands come from. Products of
    8-bit values would be added in another order than in a large tile. It does not look behind an operation with side effects.
    """
    if _ASM and dtype == tl.bfloat16 and values.dtype != tl.bfloat16:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values.to(dtype)], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return values.to(dtype)


@hashed
@triton.jit
def load_slots(
    keys,
    values,
    table,
    index,  # [N] logical indices of keys
    is_stored,  # [N]: the others may hold NaN, and 0 * NaN is NaN, so that zeros are returned for them
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """(keys, values), each [N, PADDED]. Caches of fewer bits are converted here."""
    lane = tl.arange(0, PADDED)
    page = tl.load(table + index // PAGE, mask=is_stored, other=0)
    slot = page.to(tl.int64) * PAGE + index % PAGE
    at = (slot * (KV_HEADS * WIDTH))[:, None] + lane[None, :]
    is_kept = is_stored[:, None] & (lane < WIDTH)[None, :]
    key, value = tl.load(keys + at, mask=is_kept, other=0.0), tl.load(values + at, mask=is_kept, other=0.0)
    return converted(key, dtype), converted(value, dtype)


@hashed
@triton.jit
def load_whole_slots(
    keys,
    values,
    table,
    index,
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The same where all keys are stored."""
    lane = tl.arange(0, PADDED)
    slot = tl.load(table + index // PAGE).to(tl.int64) * PAGE + index % PAGE
    at = (slot * (KV_HEADS * WIDTH))[:, None] + lane[None, :]
    if WIDTH != PADDED:
        key = tl.load(keys + at, mask=(lane < WIDTH)[None, :], other=0.0)
        value = tl.load(values + at, mask=(lane < WIDTH)[None, :], other=0.0)
    else:
        key, value = tl.load(keys + at), tl.load(values + at)
    return converted(key, dtype), converted(value, dtype)


@hashed
@triton.jit
def store_state(
    states,  # [slots, rows, heads, WIDTH] float32
    sums,  # [slots, rows, heads, 2] float32
    at,  # [TILE] int64: slot, row and head
    is_live,  # [TILE]
    top,
    norm,
    total,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    lane = tl.arange(0, PADDED)
    tl.store(sums + at * 2, top, mask=is_live)
    tl.store(sums + at * 2 + 1, tl.max(norm, 1), mask=is_live)
    tl.store(states + (at * WIDTH)[:, None] + lane[None, :], total, mask=is_live[:, None] & (lane < WIDTH)[None, :])


@hashed
@triton.jit
def join_stored(
    top,
    norm,
    total,
    states,
    sums,
    at,  # [TILE] int64: row and head in the first slot
    is_live,
    first_slot,
    count,
    slot_stride,
    scale,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Join the states of `count` slots, in order. Loads bypass L1: other programs wrote the states."""
    AT_ONCE: tl.constexpr = max(1, min(8, 128 // TILE))  # as registers allow
    lane = tl.arange(0, PADDED)
    column = tl.zeros(norm.shape, tl.int32)
    for first in range(0, count, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            is_some = is_live & (first + i < count)
            state = at + (first_slot + first + i) * slot_stride
            next_top = tl.load(sums + state * 2, mask=is_some, other=NO_KEYS, cache_modifier=".cg")
            next_norm = tl.load(
                sums + (state * 2 + 1)[:, None] + column, mask=is_some[:, None], other=0.0, cache_modifier=".cg"
            )
            next_total = tl.load(
                states + (state * WIDTH)[:, None] + lane[None, :],
                mask=is_some[:, None] & (lane < WIDTH)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            top, norm, total = join(top, norm, total, next_top, next_norm, next_total, scale)
    return top, norm, total


@hashed
@triton.jit
def others_run(counter, count):
    """Whether others of the `count` programs that share this counter have not come here yet. If not, their stores are visible,
    and the counter is zero again for the next launch."""
    tl.debug_barrier()  # all threads have stored before the counter is incremented
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    tl.store(counter, 0, mask=arrived == count)
    return arrived != count


@hashed
@triton.jit
def node_position(context, row, lineage):
    """Position of a row: in a tree, that of its last ancestor and 1. `lineage` are its bits of `ancestors`."""
    return context + tl.where(lineage == -1, row, popcount(lineage.to(tl.uint64)) - 1)


@hashed
@triton.jit
def popcount(x):
    """Number of set bits of a uint64, as int32."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@hashed
@triton.jit
def nth_bit(x, n):
    """Index of the set bit of a uint64 that has `n` set bits below it, as int32. 63 if there is none."""
    index = n * 0
    for i in tl.static_range(6):
        x, n, index = _look_above(x, n, index, 32 >> i)
    return index


@hashed
@triton.jit
def _look_above(x, n, index, HALF: tl.constexpr):
    """Go on with the bits from `HALF` on, if fewer than `n` and one are below it."""
    below = popcount(x & ((1 << HALF) - 1))
    is_above = n >= below
    return tl.where(is_above, x >> HALF, x), tl.where(is_above, n - below, n), tl.where(is_above, index + HALF, index)
