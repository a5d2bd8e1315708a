"""The state of drafts that a batch makes token after token, by replays of one graph: which column is next is on the device."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait


@dataclass(frozen=True, slots=True, eq=False)
class ChainSteps:
    tokens: Tensor  # [B, K] int64, the drafts; -1: none yet
    newest: Tensor  # [B] int64, the newest draft of each slot
    lengths: Tensor  # [B] int32, committed tokens and drafts
    column: Tensor  # [1] int64, number of drafts

    @staticmethod
    def of(size: int, most: int, device: torch.device) -> "ChainSteps":
        """For up to `most` drafts of each slot."""
        tokens = torch.zeros(size, most, dtype=torch.int64, device=device)
        lengths = torch.full((size,), 2, dtype=torch.int32, device=device)
        return ChainSteps(
            tokens, torch.zeros_like(tokens[:, 0]), lengths, torch.zeros(1, dtype=torch.int64, device=device)
        )


def begin_chains(steps: ChainSteps, committed: Tensor) -> None:
    """Forget the drafts; `committed` [B] int32 are the lengths of the sequences."""
    steps.tokens.fill_(-1)
    steps.lengths.copy_(committed)
    steps.column.zero_()


def append_drafts(steps: ChainSteps, picks: Tensor) -> None:
    """Every slot gets the draft token `picks` [B] int64."""
    size, most = steps.tokens.shape
    _append[(1,)](
        picks, steps.tokens, steps.newest, steps.lengths, steps.column, size, most,
        BLOCK=triton.next_power_of_2(size), num_warps=1, **PDL,
    )  # fmt: skip


@triton.jit
def _append(picks, tokens, newest, lengths, column, size, most, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_wait(PDL)
    gdc_launch(PDL)
    slot = tl.arange(0, BLOCK)
    is_real = slot < size
    token, at = tl.load(picks + slot, mask=is_real, other=0), tl.load(column)
    tl.store(newest + slot, token, mask=is_real)
    tl.store(tokens + slot * most + at, token, mask=is_real & (at < most))
    tl.store(lengths + slot, tl.load(lengths + slot, mask=is_real, other=0) + 1, mask=is_real)
    tl.store(column, at + 1)
