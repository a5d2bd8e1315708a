"""act(gate) * up, the gated activation of a feed-forward layer.

silu            silu(gate) * up (Llama)
gelu_tanh       gelu(gate) * up, with the tanh approximation (Gemma)
clamped_swiglu  gate sigmoid(1.702 gate) (up + 1), with gate at most 7 and up within -7..7 (gpt-oss)
"""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from paceline.kernels.cpu import native
from paceline.kernels.formats.activation import NUMBERS, SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def gated(gate_up: Tensor, kind: Activation = "silu") -> Tensor:
    """gate_up [T, 2F], gate first -> [T, F]."""
    if not native.supports(gate_up):
        return gated_reference(gate_up, kind)
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width)
    native.library().for_rows(rows).paceline_gated(  # type: ignore[union-attr]  # supports() checked it
        gate_up.data_ptr(), out.data_ptr(), rows, width, NUMBERS[kind]
    )
    return out


def gated_reference(gate_up: Tensor, kind: Activation = "silu") -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    if kind == "gelu_tanh":
        return gelu(gate, approximate="tanh") * up
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return silu(gate) * up
