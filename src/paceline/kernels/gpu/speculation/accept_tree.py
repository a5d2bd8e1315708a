"""The coupled acceptance rule for token trees, and the update of the sequences' state.

Starting at the last committed token, the kernel moves to the child that equals the target's sample, while there is one. The
sample that no child equals is committed last. The reference is `speculation/verification/verification.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.speculation.accept import DeviceState


@dataclass(frozen=True, slots=True, eq=False)
class AcceptedPath:
    """Accepted paths of S trees with at most L levels."""

    counts: Tensor  # [S] int32, accepted nodes; 0 if inactive
    is_bonus: Tensor  # [S] int32, 1 if the path ends at a leaf: no draft was rejected
    tokens: Tensor  # [S, L + 1] int64, tokens committed in this step, then -1; all -1 if inactive
    rows: Tensor  # [S, L + 1] int64, rows of the pass: last committed token, accepted nodes, then the last repeated


def path_buffers(trees: int, levels: int, device: torch.device | str) -> AcceptedPath:
    counts, is_bonus = torch.zeros(2, trees, dtype=torch.int32, device=device).unbind()
    return AcceptedPath(
        counts,
        is_bonus,
        torch.full((trees, levels + 1), -1, dtype=torch.int64, device=device),
        torch.zeros(trees, levels + 1, dtype=torch.int64, device=device),
    )


def accept_trees(
    drafts: Tensor,  # [S, N] int64
    parents: Tensor,  # [S, N] int32
    picks: Tensor,  # [S, 1 + N] int64, the target's samples, one per row of the pass
    node_limits: Tensor,  # [S] int32, number of valid nodes
    active: Tensor,  # [S] int32 or bool
    state: DeviceState,
    out: AcceptedPath,
) -> None:
    """Write `out` and update `state`: length += accepted + 1. The state of inactive sequences does not change."""
    trees, nodes = drafts.shape
    assert picks.shape == (trees, 1 + nodes)
    for tensor in (drafts, parents, picks, state.last, out.tokens, out.rows):
        assert tensor.is_contiguous()
    _walk[(trees,)](
        drafts,
        parents,
        picks,
        node_limits,
        active,
        state.lengths,
        state.last,
        out.counts,
        out.is_bonus,
        out.tokens,
        out.rows,
        NODES=nodes,
        STEPS=out.tokens.shape[1],
        PADDED=triton.next_power_of_2(1 + nodes),
        num_warps=1,
        **PDL,
    )


@triton.jit
def _walk(
    drafts,
    parents,
    picks,
    node_limits,
    active,
    lengths,
    last,
    counts,
    is_bonus,
    tokens,
    rows,
    NODES: tl.constexpr,
    STEPS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    tree = tl.program_id(0)
    node = tl.arange(0, PADDED)
    is_active = tl.load(active + tree) != 0
    is_node = node < tl.minimum(tl.load(node_limits + tree), NODES)
    drafted = tl.load(drafts + tree * NODES + node, mask=is_node, other=-1)
    parent = tl.load(parents + tree * NODES + node, mask=is_node, other=-2)
    picked = tl.load(picks + tree * (1 + NODES) + node, mask=node < 1 + NODES, other=-1)  # by row

    row, count, is_walking, bonus = 0, 0, is_active, 0
    before = tl.load(last + tree * 2 + 1)
    newest = before
    for step in range(STEPS):
        pick = tl.sum(tl.where(node == row, picked, 0), 0)
        before = tl.where(is_walking, newest, before)
        newest = tl.where(is_walking, pick, newest)
        tl.store(tokens + tree * STEPS + step, tl.where(is_walking, pick, -1))
        tl.store(rows + tree * STEPS + step, (tree * (1 + NODES) + row).to(tl.int64))
        is_child = is_node & (parent == row - 1)
        child = tl.min(tl.where(is_child & (drafted == pick), node, PADDED), 0)
        has_children = tl.max(is_child.to(tl.int32), 0)
        bonus = tl.where(is_walking, 1 - has_children, bonus)
        is_walking = is_walking & (child < PADDED) & (step < STEPS - 1)
        row = tl.where(is_walking, child + 1, row)
        count += is_walking.to(tl.int32)
    tl.store(counts + tree, count)
    tl.store(is_bonus + tree, bonus)
    if is_active:
        tl.store(lengths + tree, tl.load(lengths + tree) + count + 1)
        tl.store(last + tree * 2, before)
        tl.store(last + tree * 2 + 1, newest)
