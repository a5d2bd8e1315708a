"""Forward pass of `DecoderModel` on a GPU. Few rows: five fused kernels per layer. Many rows: the vendor's matrix products.

No function here waits for the device or branches on device values, so a whole pass can be captured as a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.formats.layout import LONG_ROWS, AttentionLayout, PassSize
from paceline.kernels.formats.linear import DenseWeight, LinearWeight
from paceline.kernels.gpu.activation import silu_mul
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan, ragged_plan
from paceline.kernels.gpu.attention.prompts import attend_long_prompt, supports_prompts
from paceline.kernels.gpu.attention.rotary import HeadNorms, rotate_and_store
from paceline.kernels.gpu.experts.feed import feed_experts
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.linear import MAX_ROWS, Normed, add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from paceline.models.decoder.decoder import AfterLayer, DecoderWeights, ForwardOutput, Layer
from paceline.models.families.spec import DecoderSpec


def plan_pass(model: DecoderWeights, size: PassSize, scratch: AttentionScratch | None = None) -> AttentionPlan:
    """Attention plan of passes of this size; create it once for each size."""
    config, rows, sequences = model.config, size.rows, size.sequences
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    if size.rows_each == rows > 1:
        return ragged_plan(rows, sequences, *heads, model.device, scratch, size.few_rows, size.num_decoding)
    return attention_plan(rows, sequences, size.rows_each, *heads, model.device, scratch=scratch, is_uniform=True)


@dataclass(frozen=True, slots=True, eq=False)
class _PassInputs:
    """Arguments of `gpu_forward`."""

    tokens: Tensor
    positions: Tensor
    layout: AttentionLayout
    cache: Sequence[tuple[Tensor, Tensor]]
    logit_rows: Tensor | None
    state_layers: tuple[int, ...]
    last_hidden: bool
    plan: AttentionPlan
    after_layer: AfterLayer | None
    logits_out: Tensor | None
    attention_out: Tensor | None


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
    plan = plan or plan_pass(model, PassSize(len(tokens), len(layout.context_lens), len(tokens)))
    is_fused = len(tokens) <= MAX_ROWS and _is_plain(model.config) and model.layers[0].reduce is None
    inputs = _PassInputs(
        tokens,
        positions,
        layout,
        cache,
        logit_rows,
        state_layers,
        last_hidden,
        plan,
        after_layer,
        logits_out,
        attention_out,
    )
    output = _few_rows(model, inputs) if is_fused else _many_rows(model, inputs)
    if model.device.type == "meta":
        states = torch.empty(len(tokens), model.config.hidden_size, dtype=model.dtype, device=model.device)
        return replace(output, hidden_by_layer=dict.fromkeys(state_layers, states))
    return output


def _is_plain(config: DecoderSpec) -> bool:
    """Whether the kernels for few rows compute all that the layers of a model do."""
    heads, ffn = config.heads, config.ffn
    has_others = heads.has_qk_norm or heads.has_output_bias or config.norms != "pre" or config.experts is not None
    return not has_others and ffn.activation == "silu" and len(config.rotary) == 1


def _layers(
    model: DecoderWeights, cache: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, tuple[Layer, Tensor, tuple[Tensor, Tensor]]]]:
    """(number, (layer, the norm after it, its cache)). On the device `meta`, one layer stands for all of the same window: they
    use the same kernels."""
    layers = enumerate(zip(model.layers, model.norms_after, cache, strict=True))
    if model.device.type != "meta":
        return layers
    windows = [layer.spec.window for layer in model.layers]
    return ((i, layer) for i, layer in layers if windows.index(windows[i]) == i)


def _few_rows(model: DecoderWeights, inputs: _PassInputs) -> ForwardOutput:
    config, inner = model.config, {}
    hidden, normed = _embed(model, inputs.tokens)
    for i, (layer, next_norm, (keys, values)) in _layers(model, inputs.cache):
        if i in inputs.state_layers:
            inner[i] = hidden
        q = qkv_rotary_store(
            normed,
            layer.qkv,
            layer.qkv_bias,
            model.cos,
            model.sin,
            inputs.positions,
            inputs.layout.slots,
            keys,
            values,
            config.num_heads,
        )
        attended = _attend(model, i, q, keys, values, inputs)
        hidden, normed = add_linear(attended, layer.output, hidden, layer.post_attention_norm, config.rms_eps)
        gated = gate_up(normed, layer.gate_up)
        hidden, normed = add_linear(gated, layer.down, hidden, next_norm, config.rms_eps)
        if inputs.after_layer is not None:
            inputs.after_layer(i)
    if config.num_layers in inputs.state_layers:
        inner[config.num_layers] = hidden
    last = _apply_norm(normed) if inputs.last_hidden else None
    logits, logit_rows = None, inputs.logit_rows
    if logit_rows is not None and len(logit_rows):
        if len(logit_rows) < len(inputs.tokens):
            normed = Normed(normed.scaled[logit_rows], normed.squares[logit_rows], normed.eps)
        logits = model.expand_logits(linear(normed, model.head, out_dtype=torch.float32, out=inputs.logits_out))
    return ForwardOutput(logits, last, inner)


def _many_rows(model: DecoderWeights, inputs: _PassInputs) -> ForwardOutput:
    eps, inner, num_layers = model.config.rms_eps, {}, model.config.num_layers
    where = inputs.layout.starts, inputs.layout.context_lens, inputs.layout.block_tables
    logit_rows, partial_layer = inputs.logit_rows, _partial_layer(model, inputs)
    has_logits = logit_rows is not None and len(logit_rows) > 0
    hidden = model.embed(inputs.tokens)
    normed = rms_norm(hidden, model.layers[0].input_norm, eps)
    for i, (layer, next_norm, (keys, values)) in _layers(model, inputs.cache):
        if i in inputs.state_layers:
            inner[i] = hidden
        qkv = _product(normed, layer.qkv, layer.qkv_bias)
        rotary = model.rotary[layer.spec.rotary]
        q = rotate_and_store(qkv, inputs.positions, *rotary, keys, values, *where, norms=_head_norms(layer))
        is_partial = i == partial_layer
        if has_logits or not is_partial:
            attended = _attend(model, i, q, keys, values, inputs)
            if is_partial:
                attended, hidden = attended[logit_rows], hidden[logit_rows]
            attended = _product(attended, layer.output, layer.output_bias, by_vendor=is_partial)
            attended = _norm_output(layer.sum_over_ranks(attended), layer.attention_norm, eps)
            normed, hidden = add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            fed = layer.sum_over_ranks(_feed_forward(layer, normed, by_vendor=is_partial))
            fed = _norm_output(fed, layer.feed_forward_norm, eps)
            normed, hidden = add_rms_norm(fed, hidden, next_norm, eps)
        if inputs.after_layer is not None:
            inputs.after_layer(i)
    if num_layers in inputs.state_layers:
        inner[num_layers] = hidden
    logits = None
    if logit_rows is not None and has_logits:
        has_only_them = partial_layer is not None or len(logit_rows) == len(inputs.tokens)
        logits = head_logits(model, normed if has_only_them else normed[logit_rows], inputs.logits_out)
    return ForwardOutput(logits, normed if inputs.last_hidden else None, inner)


def _partial_layer(model: DecoderWeights, inputs: _PassInputs) -> int | None:
    """The last layer, if it computes only the rows that have logits, after it has stored the keys and values of all rows; else
    None. The vendor's products compute these rows, whatever their number, so that no further kernel is needed. On the device
    `meta` the last layer may not be computed (`_layers`)."""
    last = model.config.num_layers - 1
    layer = model.layers[last]
    if inputs.last_hidden or last + 1 in inputs.state_layers or layer.reduce is not None or layer.experts is not None:
        return None
    is_dense = all(isinstance(weight, DenseWeight) for weight in (layer.output, layer.gate_up, layer.down))
    return last if is_dense and model.device.type != "meta" else None


def _head_norms(layer: Layer) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, layer.config.rms_eps)


def _feed_forward(layer: Layer, x: Tensor, by_vendor: bool = False) -> Tensor:
    """[T, D] -> [T, D]"""
    if layer.experts is not None:
        return feed_experts(x, layer.experts)
    gate_up = _product(x, layer.gate_up, by_vendor=by_vendor)
    kind = layer.spec.ffn.activation
    return _product(silu_mul(gate_up) if kind == "silu" else gated(gate_up, kind), layer.down, by_vendor=by_vendor)


def _norm_output(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x, weight, eps)


def _attend(model: DecoderWeights, layer: int, q: Tensor, keys: Tensor, values: Tensor, inputs: _PassInputs) -> Tensor:
    """[T, H * hd]"""
    spec, layout, plan = model.layers[layer].spec, inputs.layout, inputs.plan
    scale, window, sinks = spec.attention.scale, spec.window, model.layers[layer].sinks
    long_prompts = layout.long_prompts
    if long_prompts:
        is_plain = window is None and sinks is None and layout.ancestors is None
        long_prompts = long_prompts if is_plain and supports_prompts(q.dtype, keys) else ()
        plan = replace(plan, most_rows=LONG_ROWS) if long_prompts else plan
    out = paged_attention(
        q, keys, values, layout.starts, layout.context_lens, layout.block_tables, plan,
        scale, layout.ancestors, window, inputs.attention_out, sinks=sinks,
    )  # fmt: skip
    for prompt in long_prompts:
        attend_long_prompt(q, keys, values, layout.block_tables, prompt, scale, out)
    return out


def _embed(model: DecoderWeights, tokens: Tensor) -> tuple[Tensor, Normed]:
    """Input rows of layer 0, and the same rows with the norm of layer 0 partly applied."""
    norm, eps = model.layers[0].input_norm, model.config.rms_eps
    if model.has_plain_embedding and isinstance(model.embedding, DenseWeight):
        return embed(tokens, model.embedding.values, norm, eps)
    rows = model.embed(tokens)
    return embed(torch.arange(len(rows), device=rows.device), rows, norm, eps)


def _apply_norm(normed: Normed) -> Tensor:
    """[T, D] after the norm."""
    mean = normed.squares.sum(1, keepdim=True) / normed.scaled.shape[1]
    return (normed.scaled.float() * torch.rsqrt(mean + normed.eps)).to(normed.scaled.dtype)


def head_logits(model: DecoderWeights, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """[R, V] float32 from [R, D] after the final norm. Logits are never rounded to fewer bits, which would create ties."""
    head = model.head
    if len(rows) > MAX_ROWS and not rows.is_cpu and rows.dtype is not torch.float32 and isinstance(head, DenseWeight):
        weight = head.values.t()
        if out is None:
            return model.expand_logits(torch.mm(rows, weight, out_dtype=torch.float32))
        return model.expand_logits(torch.mm(rows, weight, out_dtype=torch.float32, out=out))
    return model.expand_logits(linear(rows, head, out_dtype=torch.float32, out=out))


def _product(x: Tensor, weight: LinearWeight, bias: Tensor | None = None, by_vendor: bool = False) -> Tensor:
    """Multiplies x [T, K] into [T, N], for any number of rows. The bits of few rows do not depend on their number, which the
    vendor's library does not promise. With `by_vendor` the library computes few rows of dense weights too."""
    if isinstance(weight, DenseWeight) and (by_vendor or len(x) > MAX_ROWS):
        return dense_linear(x, weight.values, bias)
    return linear(x, weight, bias)
