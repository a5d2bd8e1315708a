"""Forward pass of an EAGLE head on a GPU: seven kernels if rows are few. No function here waits for the device or branches on
device values.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.gpu.activation import silu_mul
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan
from paceline.kernels.gpu.attention.rotary import rotate_and_store
from paceline.kernels.gpu.linear import MAX_ROWS, Normed, add_linear, gate_up, linear
from paceline.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.gpu.speculation.join_norms import join_norms
from paceline.models.heads.eagle.eagle_weights import EagleWeights


def plan_eagle(
    model: EagleWeights, rows: int, sequences: int, scratch: AttentionScratch | None = None
) -> AttentionPlan:
    """Attention plan for passes of this size."""
    c = model.config
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    return attention_plan(rows, sequences, -(-rows // sequences), *heads, model.device, scratch=scratch)


def gpu_eagle_forward(
    model: EagleWeights,
    states: Tensor,  # [T, D]
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    layout: AttentionLayout,
    cache: tuple[Tensor, Tensor],
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Computes `EagleModel.forward`, which calls it. If `plan` is None, the pass makes a new plan."""
    return gpu_eagle_pass(model, states, None, tokens, positions, layout, cache, plan)[0]


def gpu_eagle_pass(
    model: EagleWeights,
    states: Tensor,  # [R, D]
    rows: Tensor | None,  # [T] int64: rows of `states` that precede `tokens`. None if these are all, in order
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    layout: AttentionLayout,
    cache: tuple[Tensor, Tensor],
    plan: AttentionPlan | None = None,
    first_row: int = 0,
) -> tuple[Tensor, Normed]:
    """Returns the states [T, D], and the same states with the final norm partly applied. Earlier passes have cached the first
    `first_row` rows of each sequence's tree."""
    c, layer, eps = model.config, model.layer, model.config.rms_eps
    assert isinstance(model.embedding, DenseWeight)  # on a GPU
    plan = plan or plan_eagle(model, len(tokens), len(layout.context_lens))
    joined, residual = join_norms(
        tokens, model.embedding.values, model.input_norm, states, model.hidden_norm, eps, rows, c.norm_before_residual
    )
    qkv = product(joined, layer.qkv)
    where = layout.starts, layout.context_lens, layout.block_tables
    q = rotate_and_store(qkv, positions, model.cos, model.sin, *cache, *where, first_row)
    attended = paged_attention(q, *cache, *where, plan, c.head_dim**-0.5, layout.ancestors, first_row=first_row)
    if len(tokens) <= MAX_ROWS:
        hidden, normed = add_linear(attended, layer.output, residual, layer.post_attention_norm, eps)
        return add_linear(gate_up(normed, layer.gate_up), layer.down, hidden, model.final_norm, eps)
    dense, hidden = add_rms_norm(product(attended, layer.output), residual, layer.post_attention_norm, eps)
    out = product(silu_mul(product(dense, layer.gate_up)), layer.down) + hidden
    return out, _as_normed(gpu_eagle_norm(model, out))


def gpu_eagle_norm(model: EagleWeights, states: Tensor) -> Tensor:
    """[R, D]: states after the final norm."""
    return rms_norm(states, model.final_norm, model.config.rms_eps)


def gpu_eagle_logits(model: EagleWeights, normed: Normed, rows: Tensor | None = None) -> Tensor:
    """The logits [R, V'] of `rows` in float32, by default of all rows."""
    if rows is not None:
        normed = Normed(normed.scaled[rows], normed.squares[rows], normed.eps)
    if len(normed.scaled) <= MAX_ROWS:
        return linear(normed, model.vocabulary.head, out_dtype=torch.float32)
    mean = normed.squares.sum(1, keepdim=True) / normed.scaled.shape[1]
    return product((normed.scaled * torch.rsqrt(mean + normed.eps)).to(normed.scaled.dtype), model.vocabulary.head)


def product(x: Tensor, weight: LinearWeight) -> Tensor:
    """x [T, K] -> [T, N], for any number of rows."""
    if isinstance(weight, DenseWeight) and len(x) > MAX_ROWS:
        return dense_linear(x, weight.values)
    return linear(x, weight)


def _as_normed(normed: Tensor) -> Normed:
    """A `Normed` whose remaining factor is 1."""
    return Normed(normed, torch.full((len(normed), 1), normed.shape[1], dtype=torch.float32, device=normed.device), 0.0)
