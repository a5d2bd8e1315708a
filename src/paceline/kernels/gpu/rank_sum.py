"""A sum over ranks whose memory all of them can access.

Every rank writes its values to its own memory, marks that it has done so, waits for the marks of the other ranks and adds all
values in the order of the ranks. Program i of a rank waits for program i of every other rank only. A turn number marks what is
written. It is in device memory, so that a captured launch continues where the one before it ended. Every program has a part of
the memory of its own, whatever the type of the values, with two halves for consecutive turns: a program that is a turn ahead
does not overwrite what another rank still reads.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values that a program adds."""
MAX_PROGRAMS = 512
PART_BYTES = BLOCK * 8
"""Bytes of one program in one turn: values have at most eight bytes."""
HALF_BYTES = PART_BYTES * MAX_PROGRAMS
"""Bytes of all programs in one turn."""
MEMORY_BYTES = 2 * HALF_BYTES + 4 * MAX_PROGRAMS
"""Memory of a rank that all ranks can access: the values of two turns, and the turn that each program has written. Zeros at
first."""


def add_ranks(
    values: Tensor,  # contiguous
    addresses: Tensor,  # [ranks] int64: the memory of every rank
    turns: Tensor,  # [MAX_PROGRAMS] int32: turns that are done; zeros at first
    rank: int,
) -> None:
    """Replace `values` by their sum over all ranks. Every rank calls it with as many values, in the same order of calls."""
    assert values.is_contiguous()
    flat = values.view(-1)
    for part in flat.split(BLOCK * MAX_PROGRAMS):
        _add_ranks[(triton.cdiv(len(part), BLOCK),)](
            part,
            addresses,
            turns,
            len(part),
            rank,
            RANKS=len(addresses),
            PART=PART_BYTES // part.element_size(),
            HALF=HALF_BYTES // part.element_size(),
            MARKS=2 * HALF_BYTES // 4,
            BLOCK=BLOCK,
            IS_FLOAT=part.is_floating_point(),
        )


@triton.jit(do_not_specialize=["count", "rank"])
def _add_ranks(
    values,
    addresses,
    turns,
    count,
    rank,
    RANKS: tl.constexpr,
    PART: tl.constexpr,
    HALF: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FLOAT: tl.constexpr,
):
    program = tl.program_id(0)
    turn = tl.load(turns + program) + 1
    at = program * BLOCK + tl.arange(0, BLOCK)
    # HAZARD: programs have different turns: the part of one must not depend on the size of a value
    place = (turn & 1) * HALF + program * PART + tl.arange(0, BLOCK)
    own = tl.load(addresses + rank)
    kind = values.dtype.element_ty
    tl.store(own.to(tl.pointer_type(kind)) + place, tl.load(values + at, mask=at < count, other=0), mask=at < count)
    tl.debug_barrier()
    tl.atomic_xchg(own.to(tl.pointer_type(tl.int32)) + MARKS + program, turn, sem="release", scope="sys")
    total = tl.zeros([BLOCK], tl.float32 if IS_FLOAT else tl.int64)
    for other in tl.static_range(RANKS):
        address = tl.load(addresses + other)
        mark = address.to(tl.pointer_type(tl.int32)) + MARKS + program
        while tl.atomic_add(mark, 0, sem="acquire", scope="sys") - turn < 0:  # turns may wrap around
            pass
        tl.debug_barrier()
        theirs = address.to(tl.pointer_type(kind)) + place
        total += tl.load(theirs, mask=at < count, other=0, volatile=True).to(total.dtype)
    tl.store(values + at, total.to(kind), mask=at < count)
    tl.store(turns + program, turn)
