"""Gated activations, rounded once; see `kernels/formats/activation.py` for the kinds."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.formats.activation import NUMBERS, Activation
from paceline.kernels.gpu.launch import PDL, gdc_launch, gdc_wait, hashed
from paceline.kernels.gpu.normed import Normed, norm_arguments, row_factor

_BLOCK = 1024
SILU = tl.constexpr(NUMBERS["silu"])
_GELU_TANH = tl.constexpr(NUMBERS["gelu_tanh"])
_CLAMPED_SWIGLU = tl.constexpr(NUMBERS["clamped_swiglu"])


def gated(gate_up: Tensor, kind: Activation, norm: Normed | None = None) -> Tensor:
    """gate_up [T, 2F], gate first -> [T, F]. `norm`: `gate_up` is a product with its hidden states."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    inputs, squares, parts, eps = norm_arguments(norm)
    _gated[(rows, triton.cdiv(width, _BLOCK))](
        gate_up, squares, out, parts, eps,
        INPUTS=inputs, PARTS=triton.next_power_of_2(parts) if parts else 0,
        WIDTH=width, KIND=NUMBERS[kind], BLOCK=_BLOCK, num_warps=4, **PDL,
    )  # fmt: skip
    return out


@hashed
@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """act(gate) * up in float32."""
    if KIND == _GELU_TANH:
        # x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        inner = gate + 0.044715 * gate * gate * gate
        return gate / (1.0 + tl.exp(-1.5957691216057308 * inner)) * up
    if KIND == _CLAMPED_SWIGLU:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _gated(
    gate_up, squares, out, parts, eps, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    gdc_wait(PDL)
    gdc_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_kept = lane < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + lane, mask=is_kept, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + lane, mask=is_kept, other=0.0).to(tl.float32)
    if PARTS > 0:
        factor = row_factor(squares, row, INPUTS, eps, parts, PARTS)
        gate *= factor
        up *= factor
    tl.store(out + row * WIDTH + lane, activate(gate, up, KIND).to(out.dtype.element_ty), mask=is_kept)
