"""A feed-forward layer of routed experts: each row uses the few experts with the largest router logits, or with the largest sum
of score and bias.

Experts of a row are ordered by what they were chosen by, the first of equal ones first, and their outputs are added in that
order: the bits of a row do not depend on the other rows. The output of a shared feed-forward layer is added last.
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

SMALLEST_SUM = 1e-20
"""What is added to a sum of scores, which may be 0."""


def route(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> ids [T, k] int32 and weights [T, k] float32 of each row's experts."""
    if not native.supports(logits):
        return route_reference(logits, routing, choice_bias)
    assert logits.is_contiguous()
    rows, num_experts = logits.shape
    ids = torch.empty(rows, routing.per_token, dtype=torch.int32)
    weights = torch.empty(rows, routing.per_token)
    native.library().for_rows(rows).paceline_route(  # type: ignore[union-attr]  # supports() checked it
        logits.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        None if choice_bias is None else choice_bias.data_ptr(),
        rows,
        num_experts,
        routing.per_token,
        routing.is_normalized,
        routing.scoring == "sigmoid",
        routing.num_groups,
        routing.kept_groups,
        routing.scale,
    )
    return ids, weights


def route_reference(logits: Tensor, routing: Routing, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits
    choices = scores if choice_bias is None else scores + choice_bias
    if routing.num_groups > 1:
        groups = choices.unflatten(1, (routing.num_groups, -1))  # [T, G, E / G]
        values = groups.topk(1 if choice_bias is None else 2, dim=2).values.sum(2)
        kept = values.sort(dim=1, descending=True, stable=True).indices[:, : routing.kept_groups]
        is_kept = torch.zeros_like(values, dtype=torch.bool).scatter_(1, kept, True)
        choices = groups.masked_fill(~is_kept.unsqueeze(2), float("-inf")).flatten(1)
    # a stable sort: of equal ones the first comes first
    best = choices.sort(dim=1, descending=True, stable=True)
    ids = best.indices[:, : routing.per_token]
    weights = scores.gather(1, ids)
    if routing.scoring == "softmax":
        weights = (weights - torch.logsumexp(weights if routing.is_normalized else logits, 1, keepdim=True)).exp()
    elif routing.is_normalized:
        weights = weights / (weights.sum(1, keepdim=True) + SMALLEST_SUM)
    return ids.to(torch.int32), weights * routing.scale


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
    ids, weights = route_reference(logits, experts.routing, experts.choice_bias)
    gate_up, down = _each(experts.gate_up, experts), _each(experts.down, experts)
    gate_up_bias, down_bias = _biases(experts.gate_up_bias, experts), _biases(experts.down_bias, experts)
    fed = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        inner = gated_reference(dense_linear(x[rows], gate_up[expert], gate_up_bias[expert]), experts.activation)
        fed[rows, places] = dense_linear(inner, down[expert], down_bias[expert])
    out = (fed.float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
    if experts.shared is None:
        return out
    shared_gate_up, shared_down = experts.shared
    return out + linear(gated_reference(linear(x, shared_gate_up), experts.activation), shared_down)


def _each(weight: LinearWeight, experts: Experts) -> Tensor:
    """[E, N, K] in the type of the activations."""
    assert not isinstance(weight, PackedWeight)
    values = weight.values if isinstance(weight, DenseWeight) else weight.dequantize()
    return values.unflatten(0, (experts.routing.num_experts, -1))


def _biases(bias: Tensor | None, experts: Experts) -> list[Tensor] | list[None]:
    count = experts.routing.num_experts
    return [None] * count if bias is None else list(bias.view(count, -1))
