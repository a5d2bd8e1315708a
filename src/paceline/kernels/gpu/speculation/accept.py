"""The coupled acceptance rule for chains, and the update of the sequences' state, in one kernel.

A drafted token is accepted if it equals the target's sample and all drafts before it were accepted. The sample after the last
accepted draft is committed too. Accepted drafts equal samples, so the committed tokens are a prefix of the samples.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_BLOCK = 16
"""Sequences per program."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceState:
    """State of B sequences that a step needs to start without the host."""

    lengths: Tensor  # [B] int32, committed tokens
    last: Tensor  # [B, 2] int64, the last two tokens, newest second; a draft model lacks these if a draft was accepted whole


@dataclass(frozen=True, slots=True, eq=False)
class Accepted:
    counts: Tensor  # [B] int32, accepted drafts; 0 if inactive
    tokens: Tensor  # [B, K + 1] int64, tokens committed in this step, then -1; all -1 if inactive


def accepted_buffers(batch: int, depth: int, device: torch.device | str) -> Accepted:
    return Accepted(
        torch.zeros(batch, dtype=torch.int32, device=device),
        torch.full((batch, depth + 1), -1, dtype=torch.int64, device=device),
    )


def accept_chains(
    drafts: Tensor,  # [S, K] int64, by slot
    picks: Tensor,  # [B, K + 1] int64, the target's samples, one per row of the pass
    depth_limits: Tensor,  # [S] int32, number of valid drafts
    active: Tensor,  # [S] bool
    state: DeviceState,
    out: Accepted | None = None,
    slots: Tensor | None = None,  # [B] int64, all different. None if sequence i is in slot i
) -> Accepted:
    """Write `out`, by sequence, and update `state`: length += accepted + 1. The state of inactive slots does not change."""
    batch, depth = len(picks), drafts.shape[1]
    assert picks.shape == (batch, depth + 1)
    assert slots is not None or len(drafts) == batch
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
        slots,
        batch,
        DEPTH=depth,
        PADDED=triton.next_power_of_2(depth + 1),
        BLOCK=_BLOCK,
        num_warps=1,
        **PDL,
    )
    return out


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["depth_limits", "active"])
def _accept(
    drafts,
    picks,
    depth_limits,
    active,
    lengths,
    last,
    counts,
    tokens,
    slots,
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
    if slots is None:
        slot = sequence
    else:
        slot = tl.load(slots + sequence, mask=is_real, other=0)
    is_active = (tl.load(active + slot, mask=is_real, other=0) != 0) & is_real
    limit = tl.load(depth_limits + slot, mask=is_real, other=0)
    is_row = is_real[:, None] & (node <= DEPTH)[None, :]
    drafted = tl.load(
        drafts + slot[:, None] * DEPTH + node[None, :], mask=is_real[:, None] & (node < DEPTH)[None, :], other=-1
    )
    picked = tl.load(picks + sequence[:, None] * (DEPTH + 1) + node[None, :], mask=is_row, other=-2)
    matches = (drafted == picked) & (node[None, :] < limit[:, None])
    count = tl.min(tl.where(matches, DEPTH, node[None, :]), 1)  # the first mismatch; node DEPTH always is one
    count = tl.where(is_active, count, 0)
    is_committed = (node[None, :] <= count[:, None]) & is_active[:, None]
    tl.store(tokens + sequence[:, None] * (DEPTH + 1) + node[None, :], tl.where(is_committed, picked, -1), mask=is_row)
    tl.store(counts + sequence, count, mask=is_real)

    length = tl.load(lengths + slot, mask=is_active, other=0)
    previous = tl.load(last + slot * 2 + 1, mask=is_active, other=0)
    newest = tl.sum(tl.where(node[None, :] == count[:, None], picked, 0), 1)
    before = tl.sum(tl.where(node[None, :] == count[:, None] - 1, picked, 0), 1)
    tl.store(lengths + slot, length + count + 1, mask=is_active)
    tl.store(last + slot * 2, tl.where(count > 0, before, previous), mask=is_active)
    tl.store(last + slot * 2 + 1, newest, mask=is_active)
