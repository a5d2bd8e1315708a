"""A feed-forward layer of routed experts: each row uses the few experts with the largest router logits.

Experts of a row are ordered by descending logit, the first of equal ones first, and their outputs are added in that order: the
bits of a row do not depend on the other rows.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.activation import gated_reference
from paceline.kernels.cpu import native
from paceline.kernels.formats.experts import Experts, Routing
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.linear import linear


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
