"""The coupled rule for chains, and what it does to the sequences' state, in one small kernel.

A drafted token is accepted iff it equals the target's own pick and every one before it was accepted; the pick after the
last accepted one follows. Accepted drafts equal picks, so what is committed is a prefix of the picks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_BLOCK = 16
"""Sequences that a program takes."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceState:
    """What a round needs to know of each of B sequences to start the next one without the host."""

    lengths: Tensor  # [B] int32, committed tokens
    last: Tensor  # [B, 2] int64, the last two of them, newest second: a draft that was accepted whole lags by two


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    counts: Tensor  # [B] int32, accepted drafts; 0 where inactive
    tokens: Tensor  # [B, K + 1] int64, committed this round, -1 past the last; all -1 where inactive


def accepted_buffers(batch: int, depth: int, device: torch.device | str) -> Accepted:
    return Accepted(
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.full((batch, depth + 1), -1, dtype=torch.int64, device=device),
    )


def accept_chains(
    drafts: Tensor,  # [B, K] int64
    picks: Tensor,  # [B, K + 1] int64, the target's, one for each row of the pass
    depth_limits: Tensor,  # [B] int32: drafts past the limit were never made
    active: Tensor,  # [B] bool
    state: DeviceState,
    out: Accepted | None = None,
) -> Accepted:
    """Writes `out` and moves `state` on: length += accepted + 1. Sequences that are not active keep theirs."""
    batch, depth = drafts.shape
    assert picks.shape == (batch, depth + 1)
    assert drafts.is_contiguous()
    assert picks.is_contiguous()
    assert state.last.is_contiguous()
    out = accepted_buffers(batch, depth, drafts.device) if out is None else out
    _accept[(triton.cdiv(batch, _BLOCK),)](
        drafts,
        picks,
        depth_limits,
        active,
        state.lengths,
        state.last,
        out.counts,
        out.tokens,
        batch,
        DEPTH=depth,
        PADDED=triton.next_power_of_2(depth + 1),
        BLOCK=_BLOCK,
        num_warps=1,
        **PDL,
    )
    return out


@triton.jit
def _accept(
    drafts,
    picks,
    depth_limits,
    active,
    lengths,
    last,
    counts,
    tokens,
    batch,
    DEPTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    gdc_wait(PDL)
    gdc_launch(PDL)
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    node = tl.arange(0, PADDED)
    is_real = sequence < batch
    is_active = (tl.load(active + sequence, mask=is_real, other=0) != 0) & is_real
    limit = tl.load(depth_limits + sequence, mask=is_real, other=0)
    is_row = is_real[:, None] & (node <= DEPTH)[None, :]
    drafted = tl.load(
        drafts + sequence[:, None] * DEPTH + node[None, :], mask=is_real[:, None] & (node < DEPTH)[None, :], other=-1
    )
    picked = tl.load(picks + sequence[:, None] * (DEPTH + 1) + node[None, :], mask=is_row, other=-2)
    matches = (drafted == picked) & (node[None, :] < limit[:, None])
    count = tl.min(tl.where(matches, DEPTH, node[None, :]), 1)  # the first that fails; node DEPTH always does
    count = tl.where(is_active, count, 0)
    is_committed = (node[None, :] <= count[:, None]) & is_active[:, None]
    tl.store(tokens + sequence[:, None] * (DEPTH + 1) + node[None, :], tl.where(is_committed, picked, -1), mask=is_row)
    tl.store(counts + sequence, count, mask=is_real)

    length = tl.load(lengths + sequence, mask=is_active, other=0)
    previous = tl.load(last + sequence * 2 + 1, mask=is_active, other=0)
    newest = tl.sum(tl.where(node[None, :] == count[:, None], picked, 0), 1)
    before = tl.sum(tl.where(node[None, :] == count[:, None] - 1, picked, 0), 1)
    tl.store(lengths + sequence, length + count + 1, mask=is_active)
    tl.store(last + sequence * 2, tl.where(count > 0, before, previous), mask=is_active)
    tl.store(last + sequence * 2 + 1, newest, mask=is_active)
