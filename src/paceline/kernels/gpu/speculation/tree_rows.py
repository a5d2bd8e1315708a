"""Positions, slots and ancestors of the rows of a token tree, computed on the device from the drafted parents.

Row 0 is the last committed token and row 1 + i is node i, as in `speculation/verification/tree.py`. `move_paths` makes an
accepted path contiguous: it copies its keys and values next to the context, in all layers at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core.sequence import BLOCK_SIZE
from paceline.kernels.formats.layout import MAX_TREE_ROWS
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_WORD = 4
"""Bytes copied at a time; a row of a cache is a multiple of it for every type."""


@dataclass(frozen=True, slots=True, eq=False)
class TreePlaces:
    """Rows of S trees of N nodes."""

    contexts: Tensor  # [S] int32, computed tokens before row 0
    positions: Tensor  # [S * (1 + N)] int64
    slots: Tensor  # [S * (1 + N)] int64
    ancestors: Tensor  # [S * (1 + N)] int64
    levels: Tensor  # [S] int32, levels of the valid part of each tree


def tree_places(trees: int, nodes: int, levels: Tensor) -> TreePlaces:
    """New buffers, except for `levels` [S] int32."""
    contexts = torch.zeros(trees, dtype=torch.int32, device=levels.device)
    positions, slots, ancestors = torch.zeros(3, trees * (1 + nodes), dtype=torch.int64, device=levels.device).unbind()
    return TreePlaces(contexts, positions, slots, ancestors, levels)


def place_trees(
    lengths: Tensor,  # [S] int32
    parents: Tensor,  # [S, N] int32
    limits: Tensor,  # [S] int32, number of valid nodes
    max_levels: int,
    block_tables: Tensor,  # [S, W] int32
    out: TreePlaces,
    max_position: int,  # as in `place_rows`
) -> None:
    trees, nodes = parents.shape
    assert nodes < MAX_TREE_ROWS
    assert parents.is_contiguous()
    _place[(trees,)](
        lengths, parents, limits, block_tables, out.contexts, out.positions, out.slots, out.ancestors, out.levels,
        max_position - 1, block_tables.stride(0), NODES=nodes, LEVELS=max_levels, PADDED=triton.next_power_of_2(1 + nodes),
        PAGE=BLOCK_SIZE, num_warps=1, **PDL,
    )  # fmt: skip


class CacheAddresses:
    """Addresses of the keys and values of all layers, so that one kernel can access all of them."""

    def __init__(self, cache: Sequence[tuple[Tensor, Tensor]]) -> None:
        parts = [part for layer in cache for part in layer]
        assert all(part.is_contiguous() for part in parts)
        assert len({(part.shape[2:], part.dtype) for part in parts}) == 1
        row_bytes = parts[0][0, 0].numel() * parts[0].element_size()
        assert row_bytes % _WORD == 0
        self._parts = parts  # keeps the tensors alive
        self.row_words = row_bytes // _WORD
        self.table = torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device=parts[0].device)


def move_paths(
    cache: CacheAddresses,
    contexts: Tensor,  # [S] int32
    block_tables: Tensor,  # [S, W] int32
    rows: Tensor,  # [S, L + 1] int64, rows of the whole pass: row 0, then the accepted nodes
    counts: Tensor,  # [S] int32, accepted nodes
    num_rows: int,  # rows of each tree in the pass
) -> None:
    """Copy keys and values of accepted node number j to the slot of row j. Nodes only move towards the front."""
    trees, steps = rows.shape
    _move[(trees, len(cache.table))](
        cache.table, contexts, block_tables, rows, counts, block_tables.stride(0),
        ROWS=num_rows, STEPS=steps, WORDS=cache.row_words, PADDED=triton.next_power_of_2(cache.row_words),
        PAGE=BLOCK_SIZE, num_warps=4, **PDL,
    )  # fmt: skip


@triton.jit
def _place(
    lengths, parents, limits, tables, contexts, positions, slots, ancestors, levels, last, stride,
    NODES: tl.constexpr, LEVELS: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    tree = tl.program_id(0)
    row = tl.arange(0, PADDED)
    is_real = row < 1 + NODES
    one = tl.full([PADDED], 1, tl.int64)
    seen, depth = one, tl.zeros([PADDED], tl.int32)  # all rows attend to row 0
    node = tl.where(is_real, row - 1, -1)
    for _ in range(LEVELS):  # towards the root, all rows at once
        is_node = node >= 0
        seen |= tl.where(is_node, one << (node + 1).to(tl.int64), 0)
        depth += is_node.to(tl.int32)
        node = tl.load(parents + tree * NODES + node, mask=is_node, other=-1)
    context = tl.load(lengths + tree) - 1
    index = context + row
    page = tl.load(tables + tree.to(tl.int64) * stride + index // PAGE, mask=is_real, other=0).to(tl.int64)
    at = tree * (1 + NODES) + row
    tl.store(positions + at, tl.minimum(context + depth, last).to(tl.int64), mask=is_real)
    tl.store(slots + at, page * PAGE + index % PAGE, mask=is_real)
    tl.store(ancestors + at, seen, mask=is_real)
    tl.store(contexts + tree, context)
    tl.store(levels + tree, tl.max(tl.where(is_real & (row <= tl.load(limits + tree)), depth, 0), 0))


@triton.jit
def _move(
    addresses, contexts, tables, rows, counts, stride,
    ROWS: tl.constexpr, STEPS: tl.constexpr, WORDS: tl.constexpr, PADDED: tl.constexpr, PAGE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    tree, part = tl.program_id(0), tl.program_id(1)
    words = tl.load(addresses + part).to(tl.pointer_type(tl.int32))
    table = tables + tree.to(tl.int64) * stride
    context, count = tl.load(contexts + tree), tl.load(counts + tree)
    lane = tl.arange(0, PADDED)
    # This order reads every row before it is overwritten: path rows ascend, and row j of the path is j or more
    for step in range(1, STEPS):
        if step <= count:
            source = context + tl.load(rows + tree * STEPS + step).to(tl.int32) - tree * ROWS
            target = context + step
            if source != target:
                from_slot = tl.load(table + source // PAGE).to(tl.int64) * PAGE + source % PAGE
                to_slot = tl.load(table + target // PAGE).to(tl.int64) * PAGE + target % PAGE
                word = tl.load(words + from_slot * WORDS + lane, mask=lane < WORDS, other=0)
                tl.store(words + to_slot * WORDS + lane, word, mask=lane < WORDS)
                tl.debug_barrier()
