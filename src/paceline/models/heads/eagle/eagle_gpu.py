"""Forward pass of an EAGLE head on a GPU: eight kernels for one layer and few rows. No function here waits for the device or
branches on device values.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.formats.layout import MAX_TREE_ROWS, AttentionLayout
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.products import product
from paceline.kernels.gpu.rms_norm import rms_norm
from paceline.kernels.gpu.speculation.join_norms import join_norms
from paceline.models.decoder import FusedGpuOps, Layer, forward_layer
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.eagle.eagle_weights import EagleWeights

GpuStates = Normed | Tensor
"""Hidden states of the next product. A tensor has the whole norm, as what enters the first layer of a head."""


def plan_eagle(
    model: EagleWeights, rows: int, sequences: int, scratch: AttentionScratch | None = None
) -> AttentionPlan:
    """Attention plan for passes of this size."""
    c = model.config.decoder
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    each, longest = -(-rows // sequences), len(model.cos) + MAX_TREE_ROWS
    return attention_plan(rows, sequences, each, *heads, longest, model.device, scratch=scratch, is_tree=True)


def gpu_eagle_forward(
    model: EagleWeights,
    states: Tensor,  # [T, D]
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    layout: AttentionLayout,
    cache: Sequence[tuple[Tensor, Tensor]],
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
    cache: Sequence[tuple[Tensor, Tensor]],
    plan: AttentionPlan | None = None,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """Returns the states [T, D], and the same states as the head's product reads them. Earlier passes have cached the first
    `first_row` rows of each sequence's tree."""
    plan = plan or plan_eagle(model, len(tokens), len(layout.context_lens))
    ops = HeadOps([(model.cos, model.sin)], model.config.rms_eps, positions, layout, plan, first_row=first_row)
    hidden, joined = _enter(model, states, rows, tokens)
    normed: GpuStates = joined
    for layer, next_norm, of_layer in zip(model.layers, model.norms_after, cache, strict=True):
        hidden, normed = forward_layer(layer, hidden, normed, next_norm, of_layer, ops)
    if model.config.norm_output:
        hidden = rms_norm(hidden, model.final_norm, model.config.rms_eps)
    return hidden, gpu_eagle_norm(model, hidden)


class HeadOps(FusedGpuOps):
    """The operations of a head. Its layouts in graph steps have no slots: the kernel that rotates finds them."""

    @classmethod
    def of(
        cls,
        decoder: DecoderSpec,
        rotary: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        layout: AttentionLayout,
        device: torch.device,
    ) -> "HeadOps":
        """The operations of one pass, with a plan of its own."""
        rows, sequences, longest = len(positions), len(layout.context_lens), len(rotary[0][0]) + MAX_TREE_ROWS
        heads = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        plan = attention_plan(rows, sequences, -(-rows // sequences), *heads, longest, device)
        return cls(rotary, decoder.rms_eps, positions, layout, plan)

    def project(self, normed: GpuStates, layer: Layer, cache: tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(normed, Tensor):
            return super().project(normed, layer, cache)
        qkv = product(normed.scaled, layer.qkv)
        return self.rotate_and_store(qkv, layer, cache, normed, layer.qkv_bias)


def _enter(model: EagleWeights, states: Tensor, rows: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The residual [T, D] of the first layer, and its input: [T, 2 D], or [T, D] in version 1."""
    assert isinstance(model.embedding, DenseWeight)  # on a GPU
    config = model.config
    if config.version == 1:
        chosen = states if rows is None else states[rows]
        joined = product(torch.cat((model.embedding.values[tokens], chosen), 1), model.fc, model.fc_bias)
        return joined, joined
    norms = model.input_norm, states, model.hidden_norm
    joined, residual = join_norms(
        tokens, model.embedding.values, *norms, config.rms_eps, rows, config.norm_before_residual
    )
    return residual, joined


def gpu_eagle_states(model: EagleWeights, joined: Tensor) -> Tensor:
    """g [T, D] from the target's states of all layers [T, L D]."""
    return model.fuse_joined(joined, rms_norm, product)


def gpu_eagle_norm(model: EagleWeights, states: Tensor) -> Tensor:
    """[R, D]: states as the product with the head reads them."""
    return rms_norm(states, model.final_norm, model.config.rms_eps) if model.has_final_norm else states


def gpu_eagle_logits(model: EagleWeights, normed: Tensor, rows: Tensor | None = None) -> Tensor:
    """The logits [R, V'] of `rows` in float32, by default of all rows; `normed` is as `gpu_eagle_norm` returns it."""
    return product(normed if rows is None else normed[rows], model.vocabulary.head, out_dtype=torch.float32)
