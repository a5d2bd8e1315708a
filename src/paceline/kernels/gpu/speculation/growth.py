"""Grows draft trees level by level on the device. The references are `speculation/proposers/eagle/eagle_trees.py` and
`speculation/trees/growth.py`.

The value of a node is the sum of the log confidences on its path. The best W nodes of a level are its beams, with K children
each. All scored nodes are candidates; the best of them become the draft. Of equal values, the candidate with the lower number
wins, so that parents precede their children.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.ranking import RankedTokens

_CHUNK = 16
"""Number of candidates that are compared with all other candidates at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """C nodes of each of S trees: K children of the root, then W * K per level."""

    tokens: Tensor  # [S, C] int64
    values: Tensor  # [S, C] float32
    parents: Tensor  # [S, C] int32, -1: the root


@dataclass(frozen=True, slots=True, eq=False)
class BeamNodes:
    """The W nodes of a level that have children."""

    tokens: Tensor  # [S * W] int64
    values: Tensor  # [S, W] float32
    candidates: Tensor  # [S, W] int32, their numbers among the candidates
    lineage: Tensor  # [S, W] int64, bit level * W + beam of each ancestor and of itself
    rows: Tensor  # [S * W] int64, rows of their parents in the pass over the previous level


def candidate_buffers(
    trees: int, levels: int, width: int, branches: int, device: torch.device | str
) -> tuple[Candidates, tuple[BeamNodes, BeamNodes]]:
    """Buffers of the candidates and of two levels of beams: one level is read while the next is written."""
    shape = (trees, branches + (levels - 1) * width * branches)
    candidates = Candidates(
        torch.zeros(shape, dtype=torch.int64, device=device),
        torch.zeros(shape, device=device),
        torch.full(shape, -1, dtype=torch.int32, device=device),
    )

    def beams() -> BeamNodes:
        flat = torch.zeros(trees * width, dtype=torch.int64, device=device)
        return BeamNodes(
            flat,
            torch.zeros(trees, width, device=device),
            torch.zeros(trees, width, dtype=torch.int32, device=device),
            torch.zeros(trees, width, dtype=torch.int64, device=device),
            flat.clone(),
        )

    return candidates, (beams(), beams())


def grow_level(
    children: RankedTokens,  # of one row per tree at level 0, of W rows per tree afterwards
    level: int,
    before: BeamNodes,  # their parents; unused at level 0
    candidates: Candidates,
    after: BeamNodes,
) -> None:
    """Add the children to the candidates and write the beams of the next level to `after`."""
    trees, width = after.values.shape
    branches = children.tokens.shape[1]
    parents = children.tokens.shape[0] // trees
    assert parents == (width if level else 1)
    assert width <= branches
    assert level * width + width <= 64
    _grow[(trees,)](
        children.tokens,
        children.confidence,
        before.values,
        before.candidates,
        before.lineage,
        candidates.tokens,
        candidates.values,
        candidates.parents,
        after.tokens,
        after.values,
        after.candidates,
        after.lineage,
        after.rows,
        candidates.values.shape[1],
        branches + (level - 1) * width * branches if level else 0,
        level * width,
        ROOT=level == 0,
        PARENTS=parents,
        WIDTH=width,
        BRANCHES=branches,
        PADDED=triton.next_power_of_2(parents * branches),
        num_warps=4,
        **PDL,
    )


def choose_nodes(candidates: Candidates, tokens: Tensor, parents: Tensor) -> None:
    """Write the best N candidates of each tree, best first: tokens [S, N] int64, and the index of each parent among them
    [S, N] int32; -1 is the root."""
    trees, count = candidates.values.shape
    nodes = tokens.shape[1]
    assert nodes <= count
    assert tokens.is_contiguous()
    assert parents.is_contiguous()
    _choose[(trees,)](
        candidates.tokens, candidates.values, candidates.parents, tokens, parents,
        COUNT=count, NODES=nodes, PADDED=triton.next_power_of_2(count), CHUNK=_CHUNK, num_warps=8, **PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "first", "bit"])
def _grow(
    child_tokens,
    child_confidence,
    beam_values,
    beam_candidates,
    beam_lineage,
    tokens,
    values,
    parents,
    next_tokens,
    next_values,
    next_candidates,
    next_lineage,
    next_rows,
    count,
    first,
    bit,
    ROOT: tl.constexpr,
    PARENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    tree = tl.program_id(0)
    child = tl.arange(0, PADDED)
    is_real = child < PARENTS * BRANCHES
    beam = tree * WIDTH + child // BRANCHES
    token = tl.load(child_tokens + tree * PARENTS * BRANCHES + child, mask=is_real, other=0)
    confidence = tl.load(child_confidence + tree * PARENTS * BRANCHES + child, mask=is_real, other=float("-inf"))
    value = tl.minimum(confidence, 0.0)
    if ROOT:
        parent = tl.full([PADDED], -1, tl.int32)
        lineage = tl.zeros([PADDED], tl.int64)
    else:
        value += tl.load(beam_values + beam, mask=is_real, other=0.0)
        parent = tl.load(beam_candidates + beam, mask=is_real, other=-1)
        lineage = tl.load(beam_lineage + beam, mask=is_real, other=0)
    at = tree * count + first + child
    tl.store(tokens + at, token, mask=is_real)
    tl.store(values + at, value, mask=is_real)
    tl.store(parents + at, parent, mask=is_real)

    # Padding has value -inf and comes last: of equal values the lower number is first
    is_ahead = (value[None, :] > value[:, None]) | (
        (value[None, :] == value[:, None]) & (child[None, :] < child[:, None])
    )
    place = tl.sum(is_ahead.to(tl.int32), 1)
    is_beam = is_real & (place < WIDTH)
    to = tree * WIDTH + place
    tl.store(next_tokens + to, token, mask=is_beam)
    tl.store(next_values + to, value, mask=is_beam)
    tl.store(next_candidates + to, first + child, mask=is_beam)
    tl.store(next_lineage + to, lineage | (tl.full([PADDED], 1, tl.int64) << (bit + place).to(tl.int64)), mask=is_beam)
    tl.store(next_rows + to, (tree * PARENTS + child // BRANCHES).to(tl.int64), mask=is_beam)


@triton.jit
def _choose(
    tokens,
    values,
    parents,
    node_tokens,
    node_parents,
    COUNT: tl.constexpr,
    NODES: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    tree = tl.program_id(0)
    node = tl.arange(0, PADDED)
    is_real = node < COUNT
    value = tl.load(values + tree * COUNT + node, mask=is_real, other=float("-inf"))
    parent = tl.load(parents + tree * COUNT + node, mask=is_real, other=-1)
    above = tl.load(values + tree * COUNT + parent, mask=parent >= 0, other=0.0)
    # A place is the number of better candidates; the place of the parent is counted in the same loop
    place = tl.zeros([PADDED], tl.int32)
    parent_place = tl.zeros([PADDED], tl.int32)
    for start in range(0, COUNT, CHUNK):
        other = (start + tl.arange(0, CHUNK))[None, :]
        other_value = tl.load(values + tree * COUNT + other, mask=other < COUNT, other=float("-inf"))
        is_ahead = (other_value > value[:, None]) | ((other_value == value[:, None]) & (other < node[:, None]))
        place += tl.sum((is_ahead & (other < COUNT)).to(tl.int32), 1)
        is_ahead = (other_value > above[:, None]) | ((other_value == above[:, None]) & (other < parent[:, None]))
        parent_place += tl.sum((is_ahead & (other < COUNT)).to(tl.int32), 1)
    is_node = is_real & (place < NODES)
    token = tl.load(tokens + tree * COUNT + node, mask=is_node, other=0)
    tl.store(node_tokens + tree * NODES + place, token, mask=is_node)
    tl.store(node_parents + tree * NODES + place, tl.where(parent >= 0, parent_place, -1), mask=is_node)
