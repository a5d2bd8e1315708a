"""Forward pass of an EAGLE head on a GPU: eight kernels if rows are few. No function here waits for the device or branches on
device values.
"""

import torch
from torch import Tensor

from paceline.kernels.formats.layout import MAX_TREE_ROWS, AttentionLayout
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan
from paceline.kernels.gpu.products import product
from paceline.kernels.gpu.rms_norm import rms_norm
from paceline.kernels.gpu.speculation.join_norms import join_norms
from paceline.models.decoder import FusedGpuOps, forward_layer
from paceline.models.heads.eagle.eagle_weights import EagleWeights


def plan_eagle(
    model: EagleWeights, rows: int, sequences: int, scratch: AttentionScratch | None = None
) -> AttentionPlan:
    """Attention plan for passes of this size."""
    c = model.config
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    each, longest = -(-rows // sequences), len(model.cos) + MAX_TREE_ROWS
    return attention_plan(rows, sequences, each, *heads, longest, model.device, scratch=scratch, is_tree=True)


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
) -> tuple[Tensor, Tensor]:
    """Returns the states [T, D], and the same states after the final norm. Earlier passes have cached the first
    `first_row` rows of each sequence's tree."""
    eps, keeps_normed = model.config.rms_eps, model.config.norm_before_residual
    assert isinstance(model.embedding, DenseWeight)  # on a GPU
    plan = plan or plan_eagle(model, len(tokens), len(layout.context_lens))
    joined, residual = join_norms(
        tokens, model.embedding.values, model.input_norm, states, model.hidden_norm, eps, rows, keeps_normed
    )
    ops = FusedGpuOps([(model.cos, model.sin)], eps, positions, layout, plan, first_row=first_row)
    hidden, _ = forward_layer(model.layer, residual, joined, model.final_norm, cache, ops)
    return hidden, gpu_eagle_norm(model, hidden)


def gpu_eagle_norm(model: EagleWeights, states: Tensor) -> Tensor:
    """[R, D]: states after the final norm."""
    return rms_norm(states, model.final_norm, model.config.rms_eps)


def gpu_eagle_logits(model: EagleWeights, normed: Tensor, rows: Tensor | None = None) -> Tensor:
    """The logits [R, V'] of `rows` in float32, by default of all rows; `normed` has them after the final norm."""
    return product(normed if rows is None else normed[rows], model.vocabulary.head, out_dtype=torch.float32)
