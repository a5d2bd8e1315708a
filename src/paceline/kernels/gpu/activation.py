"""silu(gate) * up, rounded as the torch reference is."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait

_BLOCK = 1024


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2F], gate first -> [T, F]."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, WIDTH=width, BLOCK=_BLOCK, num_warps=4, **PDL)
    return out


@triton.jit
def _silu_mul(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_kept = lane < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=is_kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=is_kept, other=0.0).to(tl.float32)
    narrow: tl.constexpr = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32)
    tl.store(out + row * WIDTH + lane, (activated * up).to(narrow), mask=is_kept)
