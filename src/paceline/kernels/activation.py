"""silu(gate) * up, the gated activation of a Llama feed-forward layer."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.kernels.cpu import native


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2F], gate first -> [T, F]."""
    if not native.supports(gate_up):
        return silu_mul_reference(gate_up)
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    native.library().for_rows(rows).paceline_silu_mul(  # type: ignore[union-attr]  # supports() checked it
        gate_up.data_ptr(), out.data_ptr(), rows, width
    )
    return out


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return silu(gate) * up
