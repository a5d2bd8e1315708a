"""A feed-forward layer of routed experts: each row uses the few experts with the largest router logits.

The matrices of all experts are stacked: expert e has rows e * 2F to (e + 1) * 2F of `gate_up` and rows e * D to (e + 1) * D of
`down`. Experts of a row are ordered by descending logit, the first of equal ones first, and their outputs are added in that
order: the bits of a row do not depend on the other rows.
"""

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.core.errors import UnsupportedModel
from paceline.kernels.activation import NUMBERS, Activation, gated_reference
from paceline.kernels.cpu import native
from paceline.kernels.linear import DenseWeight, LinearWeight, linear
from paceline.kernels.packing import TILE, PackedWeight


class _Header(ctypes.Structure):
    """`experts_t` in cpu/experts.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("router", "gate_up", "down", "router_bias", "gate_up_bias", "down_bias")),
        *((name, c_int64) for name in ("num_experts", "per_token", "is_normalized", "activation")),
    )


@dataclass(frozen=True, slots=True)
class Routing:
    num_experts: int
    per_token: int
    """Experts that a row uses."""
    is_normalized: bool
    """Whether the weights of a row's experts add up to 1; otherwise those of all experts do."""


class Experts:
    """Read-only. `address` is the argument of native functions, valid while this object exists; None without native kernels."""

    def __init__(
        self,
        routing: Routing,
        activation: Activation,
        router: LinearWeight,  # [E, D]
        gate_up: LinearWeight,  # [E 2F, D]
        down: LinearWeight,  # [E D, F]
        router_bias: Tensor | None = None,  # [E]
        gate_up_bias: Tensor | None = None,  # [E 2F]
        down_bias: Tensor | None = None,  # [E D]
    ) -> None:
        self.routing, self.activation = routing, activation
        self.router, self.gate_up, self.down = router, gate_up, down
        self.router_bias, self.gate_up_bias, self.down_bias = router_bias, gate_up_bias, down_bias
        self.address: int | None = None
        packed = [weight.address for weight in (router, gate_up, down) if isinstance(weight, PackedWeight)]
        is_tiled = all(weight.shape[0] % (TILE * routing.num_experts) == 0 for weight in (gate_up, down))
        is_mixed = isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight)
        if is_mixed or (isinstance(down, PackedWeight) and not is_tiled):
            raise UnsupportedModel(
                f"experts with matrices of {gate_up.shape} and {down.shape}, in formats that kernels cannot combine: "
                f"the width of an expert and its inputs must be multiples of {TILE}, in one format"
            )
        if len(packed) == 3:
            biases = [None if bias is None else bias.data_ptr() for bias in (router_bias, gate_up_bias, down_bias)]
            rest = routing.num_experts, routing.per_token, routing.is_normalized, NUMBERS[activation]
            self._header = _Header(*packed, *biases, *rest)
            self.address = ctypes.addressof(self._header)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> ids [T, k] int32 and weights [T, k] float32 of each row's experts."""
    if not native.supports(logits):
        return route_reference(logits, routing)
    assert logits.is_contiguous()
    rows, num_experts = logits.shape
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32)
    weights = torch.empty(rows, routing.per_token)
    native.library().for_rows(rows).paceline_route(  # type: ignore[union-attr]  # supports() checked it
        logits.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        rows,
        num_experts,
        routing.per_token,
        routing.is_normalized,
    )
    return ids, weights


def route_reference(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    # a stable sort: of equal logits the first comes first
    best = logits.float().sort(dim=1, descending=True, stable=True)
    values, ids = best.values[:, : routing.per_token], best.indices[:, : routing.per_token]
    total = torch.logsumexp(values if routing.is_normalized else best.values, 1, keepdim=True)
    return ids.to(torch.int32), (values - total).exp()


def feed_experts(x: Tensor, experts: Experts) -> Tensor:
    """x [T, D] -> [T, D]."""
    if experts.address is None or not native.supports(x):
        return feed_experts_reference(x, experts)
    assert x.is_contiguous()
    out = torch.empty_like(x)
    native.library().for_rows(len(x)).paceline_experts(  # type: ignore[union-attr]  # supports() checked it
        experts.address, x.data_ptr(), out.data_ptr(), len(x)
    )
    return out


def feed_experts_reference(x: Tensor, experts: Experts) -> Tensor:
    """One expert after another, each over its rows."""
    logits = linear(x, experts.router, experts.router_bias)
    ids, weights = route_reference(logits, experts.routing)
    gate_up, down = _each(experts.gate_up, experts), _each(experts.down, experts)
    gate_up_bias, down_bias = _biases(experts.gate_up_bias, experts), _biases(experts.down_bias, experts)
    fed = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated_reference(dense_linear(x[rows], gate_up[expert], gate_up_bias[expert]), experts.activation)
        fed[rows, places] = dense_linear(inner, down[expert], down_bias[expert])
    return (fed.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


def _each(weight: LinearWeight, experts: Experts) -> Tensor:
    """[E, N, K] in the type of the activations."""
    assert not isinstance(weight, PackedWeight)
    values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
    return values.unflatten(0, (experts.routing.num_experts, -1))


def _biases(bias: Tensor | None, experts: Experts) -> list[Tensor] | list[None]:
    count = experts.routing.num_experts
    return [None] * count if bias is None else list(bias.view(count, -1))
