"""RMS norm and the addition of a product to the residual stream before it, rounded as the torch reference is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait
from paceline.kernels.gpu.normed import Normed, square_units


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x [T, D] -> [T, D]; `out` may be `x`."""
    assert x.is_contiguous()
    out = torch.empty_like(x) if out is None else out
    _launch(x, x, weight, out, x, eps, is_added=False)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual), each [T, D]; `out` may be `x`, and `total` the residual."""
    assert x.is_contiguous()
    assert residual.is_contiguous()
    out = torch.empty_like(x) if out is None else out
    total = torch.empty_like(x) if total is None else total
    _launch(x, residual, weight, out, total, eps, is_added=True)
    return out, total


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Normed]:
    """h = x + residual [T, D], and h as `Normed` for the next norm."""
    assert x.is_contiguous()
    assert residual.is_contiguous()
    (rows, width), hidden, scaled = x.shape, torch.empty_like(x), torch.empty_like(x)
    squares = torch.empty(rows, 1, dtype=torch.int64, device=x.device)
    block = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        x, residual, weight, hidden, scaled, squares, WIDTH=width, BLOCK=block,
        num_warps=min(16, max(4, block // 512)), **PDL,
    )  # fmt: skip
    return hidden, Normed(scaled, squares, eps)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, is_added: bool
) -> None:
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    _norm[(rows,)](
        x, residual, weight, out, total, eps, WIDTH=width, BLOCK=block, ADD=is_added,
        num_warps=min(16, max(4, block // 512)), **PDL,
    )  # fmt: skip


@triton.jit
def _norm(
    x,
    residual,
    weight,
    out,
    total,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    lane = tl.arange(0, BLOCK)
    is_kept = lane < WIDTH
    scale = tl.load(weight + lane, mask=is_kept, other=0.0)  # before the wait: no kernel writes weights
    gdc_wait(PDL)
    gdc_launch(PDL)
    at = tl.program_id(0).to(tl.int64) * WIDTH + lane
    wide = tl.load(x + at, mask=is_kept, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + at, mask=is_kept, other=0.0).to(tl.float32)
        summed = wide.to(total.dtype.element_ty)
        tl.store(total + at, summed, mask=is_kept)
        wide = summed.to(tl.float32)  # normalise the stored, rounded value
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    narrow: tl.constexpr = out.dtype.element_ty
    normed = (wide * inverse).to(narrow).to(tl.float32) * scale.to(tl.float32)
    tl.store(out + at, normed.to(narrow), mask=is_kept)


@triton.jit
def _add_norm(
    x, residual, weight, hidden, scaled, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    lane = tl.arange(0, BLOCK)
    is_kept = lane < WIDTH
    scale = tl.load(weight + lane, mask=is_kept, other=0.0)  # before the wait: no kernel writes weights
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = row * WIDTH + lane
    narrow: tl.constexpr = hidden.dtype.element_ty
    product = tl.load(x + at, mask=is_kept, other=0.0).to(tl.float32)
    summed = (product + tl.load(residual + at, mask=is_kept, other=0.0).to(tl.float32)).to(narrow)
    wide = summed.to(tl.float32)
    tl.store(hidden + at, summed, mask=is_kept)
    tl.store(scaled + at, (wide * scale.to(tl.float32)).to(narrow), mask=is_kept)
    tl.store(squares + row, tl.sum(square_units(wide), 0))
