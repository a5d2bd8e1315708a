"""The operations of a forward pass on a GPU.

No function here waits for the device or branches on device values, so a whole pass can be captured as a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.kernels.formats.layout import LONG_ROWS, AfterLayer, AttentionLayout, PassSize
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan, ragged_plan
from paceline.kernels.gpu.attention.prompts import attend_long_prompt, supports_prompts
from paceline.kernels.gpu.attention.rotary import HeadNorms, rotate_and_store
from paceline.kernels.gpu.experts.feed import feed_experts
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.linear import add_linear, embed, gate_up, most_rows, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.products import product
from paceline.kernels.gpu.rms_norm import add_norm, add_rms_norm, rms_norm
from paceline.models.decoder.decoder import DecoderWeights, ForwardOutput, Layer
from paceline.models.decoder.ops import ComposedOps, LayerCache
from paceline.models.decoder.passes import DecoderInputs, forward_pass
from paceline.models.families.spec import DecoderSpec


def plan_pass(model: DecoderWeights, size: PassSize, scratch: AttentionScratch | None = None) -> AttentionPlan:
    """Attention plan of passes of this size; create it once for each size."""
    config, rows, sequences = model.config, size.rows, size.sequences
    longest = config.max_position + LONG_ROWS  # padding after the last token included
    shape = config.num_heads, config.num_kv_heads, config.head_dim, longest, model.device
    if size.rows_each == rows > 1:
        decoding = size.few_rows, size.num_decoding
        return ragged_plan(rows, sequences, *shape, scratch, *decoding, is_tree=size.is_tree)
    each = size.rows_each
    return attention_plan(rows, sequences, each, *shape, scratch=scratch, is_uniform=True, is_tree=size.is_tree)


def gpu_forward(
    model: DecoderWeights,
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    layout: AttentionLayout,
    cache: Sequence[tuple[Tensor, Tensor]],
    logit_rows: Tensor | None,  # [R] int64
    state_layers: tuple[int, ...] = (),
    last_hidden: bool = False,
    plan: AttentionPlan | None = None,
    after_layer: AfterLayer | None = None,
    logits_out: Tensor | None = None,  # [R, V] float32
    attention_out: Tensor | None = None,  # [T, H * hd]
) -> ForwardOutput:
    """Computes `DecoderModel.forward`, which calls it. If `plan` is None, the pass makes a new plan. `logits_out` and
    `attention_out` are buffers for the logits and for every layer's attention. Attention does not write rows that belong to no
    sequence."""
    plan = plan or plan_pass(
        model, PassSize(len(tokens), len(layout.context_lens), len(tokens), is_tree=layout.ancestors is not None)
    )
    inputs = DecoderInputs(tokens, cache, logit_rows, state_layers, last_hidden, after_layer)
    where = model.rotary, model.config.rms_eps, positions, layout, plan, attention_out, logits_out
    if is_plain(model.config) and model.layers[0].reduce is None:
        return forward_pass(model, inputs, FusedGpuOps(*where))
    return forward_pass(model, inputs, GpuOps(*where, query_scale=model.query_scale))


def is_plain(config: DecoderSpec) -> bool:
    """Whether the fused kernels compute all that the layers of a model do."""
    heads, ffn = config.heads, config.ffn
    has_norms = heads.has_qk_norm or heads.has_joined_qk_norm or config.norms != "pre"
    has_others = heads.has_output_bias or heads.query_scale is not None or heads.latent is not None
    has_others |= config.experts is not None
    has_others |= heads.own is not None
    is_scaled = config.residual_scale != 1.0 or config.layers[0].has_scale
    return not (has_norms or has_others or is_scaled) and ffn.activation == "silu" and len(config.rotary) == 1


class _GpuRows:
    """The rows of one pass on a GPU."""

    def __init__(
        self,
        rotary: Sequence[tuple[Tensor, Tensor]],
        rms_eps: float,
        positions: Tensor,
        layout: AttentionLayout,
        plan: AttentionPlan,
        attention_out: Tensor | None = None,
        logits_out: Tensor | None = None,
        first_row: int = 0,
        query_scale: Tensor | None = None,
    ) -> None:
        """`rotary` has cos and sin [max_position, hd / 2] of each rotary table, `query_scale` the factors of queries
        [max_position]. `first_row` is as in `paged_attention`."""
        self.rotary, self.rms_eps = rotary, rms_eps
        self.positions, self.layout, self.plan, self.first_row = positions, layout, plan, first_row
        self.attention_out, self.logits_out = attention_out, logits_out
        self._query_scale = None if query_scale is None else query_scale[positions][:, None, None]

    def can_narrow(self, model: DecoderWeights) -> bool:
        layer = model.layers[-1]
        return layer.reduce is None and layer.experts is None and model.device.type != "meta"

    def skips(self, model: DecoderWeights, number: int) -> bool:
        if model.device.type != "meta":
            return False
        kinds = [(layer.spec.window, layer.spec.ffn) for layer in model.layers]
        return kinds.index(kinds[number]) < number

    def all_layers(self, hidden: Tensor, normed: object, state_layers: Sequence[int]) -> None:
        return None

    def rotate_and_store(
        self, qkv: Tensor, layer: Layer, cache: LayerCache, before: Normed | None = None, bias: Tensor | None = None
    ) -> Tensor:
        layout, rotary = self.layout, self.rotary[layer.spec.rotary]
        norms = None
        if layer.q_norm is not None and layer.k_norm is not None and layer.spec.attention.own is None:
            if layer.spec.attention.has_joined_qk_norm:
                self._norm_joined_heads(qkv, layer.q_norm, layer.k_norm)
            else:
                norms = HeadNorms(layer.q_norm, layer.k_norm, self.rms_eps)
        q = rotate_and_store(
            qkv, self.positions, *rotary, *cache, layout.starts, layout.context_lens, layout.block_tables,
            self.first_row, norms, before, bias,
        )  # fmt: skip
        return q if self._query_scale is None else q * self._query_scale

    def _norm_joined_heads(self, qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> None:
        queries, keys, _ = qkv.split([len(q_weight), len(k_weight), len(k_weight)], 1)
        for part, weight in ((queries, q_weight), (keys, k_weight)):
            part.copy_(rms_norm(part.contiguous(), weight, self.rms_eps))

    def attend(self, q: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        (keys, values), spec, layout, plan = cache, layer.spec, self.layout, self.plan
        scale, cap, window, sinks = spec.attention.scale, spec.attention.score_cap, spec.window, layer.sinks
        long_prompts = layout.long_prompts
        if long_prompts:
            is_plain = window is None and sinks is None and cap is None and layout.ancestors is None
            long_prompts = long_prompts if is_plain and supports_prompts(q.dtype, keys) else ()
            plan = replace(plan, most_rows=LONG_ROWS) if long_prompts else plan
        out = paged_attention(
            q, keys, values, layout.starts, layout.context_lens, layout.block_tables, plan,
            scale, layout.ancestors, window, self.attention_out, self.first_row, sinks, cap,
        )  # fmt: skip
        for prompt in long_prompts:
            attend_long_prompt(q, keys, values, layout.block_tables, prompt, scale, out)
        return out


class GpuOps(_GpuRows, ComposedOps):
    """The operations of any model on a GPU."""

    def product(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        return product(x, weight, bias)

    def feed(self, normed: Tensor, layer: Layer) -> Tensor:
        if layer.experts is not None:
            return feed_experts(normed, layer.experts)
        return gated(product(normed, layer.gate_up), layer.spec.ffn.activation)

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, weight, self.rms_eps if eps is None else eps)

    def add_norm(self, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, hidden, weight, self.rms_eps)
        return total, normed

    def logits(self, model: DecoderWeights, hidden: Tensor, normed: Tensor, rows: Tensor | None) -> Tensor:
        return head_logits(model, normed if rows is None else normed[rows], self.logits_out)


GpuStates = Normed | Tensor
"""Hidden states of the next product. A tensor has the whole norm, as what enters the layer of an EAGLE head."""


class FusedGpuOps(_GpuRows):
    """The operations of a plain model on a GPU. The norms are parts of the kernels around them (`normed.py`), whatever the
    number of rows. Few rows take five kernels a layer; many rows use the vendor's matrix products."""

    def embed(self, model: DecoderWeights, tokens: Tensor) -> tuple[Tensor, GpuStates]:
        norm = model.layers[0].input_norm
        assert norm is not None  # plain models have all norms
        if model.has_plain_embedding and isinstance(model.embedding, DenseWeight):
            return embed(tokens, model.embedding.values, norm, self.rms_eps)
        rows = model.embed(tokens)
        return embed(torch.arange(len(rows), device=rows.device), rows, norm, self.rms_eps)

    def project(self, normed: GpuStates, layer: Layer, cache: LayerCache) -> Tensor:
        if isinstance(normed, Tensor):
            return self.rotate_and_store(product(normed, layer.qkv, layer.qkv_bias), layer, cache)
        if not _is_few(normed.scaled):
            return self.rotate_and_store(product(normed.scaled, layer.qkv), layer, cache, normed, layer.qkv_bias)
        return qkv_rotary_store(
            normed,
            layer.qkv,
            layer.qkv_bias,
            *self.rotary[layer.spec.rotary],
            self.positions,
            self.layout.slots,
            *cache,
            layer.spec.attention.num,
        )

    def add_attention(self, attended: Tensor, layer: Layer, hidden: Tensor) -> tuple[Tensor, GpuStates]:
        return self._add(attended, layer.output, hidden, layer.post_attention_norm)

    def feed(self, normed: GpuStates, layer: Layer) -> Tensor:
        assert isinstance(normed, Normed)
        if _is_few(normed.scaled):
            return gate_up(normed, layer.gate_up)
        return gated(product(normed.scaled, layer.gate_up), "silu", normed)

    def add_fed(self, fed: Tensor, layer: Layer, hidden: Tensor, next_norm: Tensor | None) -> tuple[Tensor, GpuStates]:
        return self._add(fed, layer.down, hidden, next_norm)

    def _add(self, x: Tensor, weight: LinearWeight, hidden: Tensor, norm: Tensor | None) -> tuple[Tensor, GpuStates]:
        assert norm is not None
        if _is_few(hidden):
            return add_linear(x, weight, hidden, norm, self.rms_eps)
        return add_norm(product(x, weight), hidden, norm, self.rms_eps)

    def logits(self, model: DecoderWeights, hidden: Tensor, normed: object, rows: Tensor | None) -> Tensor:
        states = hidden if rows is None else hidden[rows]
        return head_logits(model, self.final(model, states, None), self.logits_out)

    def final(self, model: DecoderWeights, hidden: Tensor, normed: object) -> Tensor:
        return rms_norm(hidden, model.final_norm, self.rms_eps)


def _is_few(hidden: Tensor) -> bool:
    """Whether the fused kernels compute these hidden states [T, D]."""
    return len(hidden) <= most_rows(hidden.shape[1])


def head_logits(model: DecoderWeights, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """[R, V] float32 from [R, D] after the final norm. Logits are never rounded to fewer bits, which would create ties."""
    return model.expand_logits(product(rows, model.head, out_dtype=torch.float32, out=out))
