"""Input of an EAGLE head's layer: the normed embedding of a token and a normed state, concatenated."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait


def join_norms(
    tokens: Tensor,  # [T] int64
    table: Tensor,  # [V, D]
    token_norm: Tensor,  # [D]
    states: Tensor,  # [R, D]
    state_norm: Tensor,  # [D]
    eps: float,
    rows: Tensor | None = None,  # [T] int64, row of each token's state. None if they are in order
    keep_normed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns the input [T, 2 D] and the residual [T, D], which is the states, or the normed states with `keep_normed`."""
    count, width = len(tokens), states.shape[1]
    assert table.shape[1] == width
    assert table.is_contiguous()
    assert states.is_contiguous()
    joined = torch.empty(count, 2 * width, dtype=states.dtype, device=states.device)
    residual = torch.empty(count, width, dtype=states.dtype, device=states.device)
    block = triton.next_power_of_2(width)
    _join[(count,)](
        tokens, table, token_norm, states, state_norm, tokens if rows is None else rows, joined, residual, eps,
        WIDTH=width, BLOCK=block, CHOSEN=rows is not None, KEEP_NORMED=keep_normed,
        num_warps=min(16, max(4, block // 512)), **PDL,
    )  # fmt: skip
    return joined, residual


@triton.jit
def _join(
    tokens, table, token_norm, states, state_norm, rows, joined, residual, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHOSEN: tl.constexpr, KEEP_NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    is_kept = lane < WIDTH
    token = tl.load(tokens + row)
    _norm(table + token * WIDTH, token_norm, joined + row * 2 * WIDTH, lane, is_kept, eps, WIDTH)
    source = states + (tl.load(rows + row) if CHOSEN else row) * WIDTH
    normed, state = _norm(source, state_norm, joined + row * 2 * WIDTH + WIDTH, lane, is_kept, eps, WIDTH)
    tl.store(residual + row * WIDTH + lane, normed if KEEP_NORMED else state, mask=is_kept)


@triton.jit
def _norm(source, weight, out, lane, is_kept, eps, WIDTH: tl.constexpr):
    """(stored normed row, loaded row)"""
    x = tl.load(source + lane, mask=is_kept, other=0.0)
    wide = x.to(tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    # Rounded before the product with the weight, as in the reference
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)).to(narrow).to(tl.float32)
    normed = (normed * tl.load(weight + lane, mask=is_kept, other=0.0).to(tl.float32)).to(narrow)
    tl.store(out + lane, normed, mask=is_kept)
    return normed, x
