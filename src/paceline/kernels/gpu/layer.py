"""The part of a dense layer after attention: three fused kernels for few rows, five operations with the same bits for many."""

from typing import Protocol

from torch import Tensor

from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.linear import add_linear, gate_up, most_rows
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.products import product
from paceline.kernels.gpu.rms_norm import add_norm


class DenseLayer(Protocol):
    """Weights of a layer with the activation silu, without biases after attention."""

    @property
    def output(self) -> LinearWeight: ...
    @property
    def post_attention_norm(self) -> Tensor: ...
    @property
    def gate_up(self) -> LinearWeight: ...
    @property
    def down(self) -> LinearWeight: ...


def add_layer(
    layer: DenseLayer, attended: Tensor, hidden: Tensor, next_norm: Tensor, eps: float
) -> tuple[Tensor, Normed]:
    """attended [T, H hd], hidden [T, D] -> the residual stream after the layer, and the same as `Normed` for the next norm."""
    if len(attended) <= most_rows(hidden.shape[1]):
        hidden, normed = add_linear(attended, layer.output, hidden, layer.post_attention_norm, eps)
        return add_linear(gate_up(normed, layer.gate_up), layer.down, hidden, next_norm, eps)
    hidden, normed = add_norm(product(attended, layer.output), hidden, layer.post_attention_norm, eps)
    active = gated(product(normed.scaled, layer.gate_up), "silu", normed)
    return add_norm(product(active, layer.down), hidden, next_norm, eps)
