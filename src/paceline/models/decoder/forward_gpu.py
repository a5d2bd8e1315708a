"""Forward pass of `DecoderModel` on a GPU. Few rows: five fused kernels per layer. Many rows: the vendor's matrix products.

Both give a row the same bits.

No function here waits for the device or branches on device values, so a whole pass can be captured as a CUDA graph.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.formats.layout import LONG_ROWS, AttentionLayout, PassSize
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.gpu.attention.paged import paged_attention
from paceline.kernels.gpu.attention.plan import AttentionPlan, AttentionScratch, attention_plan, ragged_plan
from paceline.kernels.gpu.attention.prompts import attend_long_prompt, supports_prompts
from paceline.kernels.gpu.attention.rotary import HeadNorms, rotate_and_store
from paceline.kernels.gpu.experts.feed import feed_experts
from paceline.kernels.gpu.gated import gated
from paceline.kernels.gpu.layer import add_layer
from paceline.kernels.gpu.linear import embed, most_rows, qkv_rotary_store
from paceline.kernels.gpu.normed import Normed
from paceline.kernels.gpu.products import product
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
    is_plain = _is_plain(model.config) and model.layers[0].reduce is None
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
    output = _plain_rows(model, inputs) if is_plain else _other_rows(model, inputs)
    if model.device.type == "meta":
        states = torch.empty(len(tokens), model.config.hidden_size, dtype=model.dtype, device=model.device)
        return replace(output, hidden_by_layer=dict.fromkeys(state_layers, states))
    return output


def _is_plain(config: DecoderSpec) -> bool:
    """Whether the fused kernels compute all that the layers of a model do."""
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


def _plain_rows(model: DecoderWeights, inputs: _PassInputs) -> ForwardOutput:
    """The norms are parts of the kernels around them (`normed.py`), whatever the number of rows."""
    eps, inner, logit_rows, partial_layer = model.config.rms_eps, {}, inputs.logit_rows, _partial_layer(model, inputs)
    hidden, normed = _embed(model, inputs.tokens)
    for i, (layer, next_norm, (keys, values)) in _layers(model, inputs.cache):
        if i in inputs.state_layers:
            inner[i] = hidden
        q = _store_and_query(model, layer, normed, keys, values, inputs)
        if i == partial_layer and logit_rows is not None and len(logit_rows):
            hidden, attended = hidden[logit_rows], _attend(model, i, q, keys, values, inputs)[logit_rows]
            hidden, normed = add_layer(layer, attended, hidden, next_norm, eps)
        elif i != partial_layer:
            attended = _attend(model, i, q, keys, values, inputs)
            hidden, normed = add_layer(layer, attended, hidden, next_norm, eps)
        if inputs.after_layer is not None:
            inputs.after_layer(i)
    if model.config.num_layers in inputs.state_layers:
        inner[model.config.num_layers] = hidden
    final, logits = model.norms_after[-1], None
    last = rms_norm(hidden, final, eps) if inputs.last_hidden else None
    if logit_rows is not None and len(logit_rows):
        if len(logit_rows) < len(hidden):
            hidden = hidden[logit_rows]
        logits = head_logits(model, rms_norm(hidden, final, eps), inputs.logits_out)
    return ForwardOutput(logits, last, inner)


def _store_and_query(
    model: DecoderWeights, layer: Layer, normed: Normed, keys: Tensor, values: Tensor, inputs: _PassInputs
) -> Tensor:
    """q [T, H, hd], rotated; k and v are stored."""
    layout, positions = inputs.layout, inputs.positions
    if len(positions) > most_rows(model.config.hidden_size):
        qkv = product(normed.scaled, layer.qkv)
        where = layout.starts, layout.context_lens, layout.block_tables
        rotary = model.cos, model.sin, keys, values
        return rotate_and_store(qkv, positions, *rotary, *where, before=normed, bias=layer.qkv_bias)
    return qkv_rotary_store(
        normed,
        layer.qkv,
        layer.qkv_bias,
        model.cos,
        model.sin,
        positions,
        layout.slots,
        keys,
        values,
        model.config.num_heads,
    )


def _other_rows(model: DecoderWeights, inputs: _PassInputs) -> ForwardOutput:
    eps, inner, num_layers = model.config.rms_eps, {}, model.config.num_layers
    where = inputs.layout.starts, inputs.layout.context_lens, inputs.layout.block_tables
    logit_rows, partial_layer = inputs.logit_rows, _partial_layer(model, inputs)
    has_logits = logit_rows is not None and len(logit_rows) > 0
    hidden = model.embed(inputs.tokens)
    normed = rms_norm(hidden, model.layers[0].input_norm, eps)
    for i, (layer, next_norm, (keys, values)) in _layers(model, inputs.cache):
        if i in inputs.state_layers:
            inner[i] = hidden
        qkv = product(normed, layer.qkv, layer.qkv_bias)
        rotary = model.rotary[layer.spec.rotary]
        q = rotate_and_store(qkv, inputs.positions, *rotary, keys, values, *where, norms=_head_norms(layer))
        is_partial = i == partial_layer
        if has_logits or not is_partial:
            attended = _attend(model, i, q, keys, values, inputs)
            if is_partial:
                attended, hidden = attended[logit_rows], hidden[logit_rows]
            attended = product(attended, layer.output, layer.output_bias)
            attended = _norm_output(layer.sum_over_ranks(attended), layer.attention_norm, eps)
            normed, hidden = add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            fed = layer.sum_over_ranks(_feed_forward(layer, normed))
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
    None. On the device `meta` the last layer may not be computed (`_layers`)."""
    last = model.config.num_layers - 1
    layer = model.layers[last]
    if inputs.logit_rows is not None and len(inputs.logit_rows) == len(inputs.tokens):
        return None
    if inputs.last_hidden or last + 1 in inputs.state_layers or layer.reduce is not None or layer.experts is not None:
        return None
    return last if model.device.type != "meta" else None


def _head_norms(layer: Layer) -> HeadNorms | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(layer.q_norm, layer.k_norm, layer.config.rms_eps)


def _feed_forward(layer: Layer, x: Tensor) -> Tensor:
    """[T, D] -> [T, D]"""
    if layer.experts is not None:
        return feed_experts(x, layer.experts)
    return product(gated(product(x, layer.gate_up), layer.spec.ffn.activation), layer.down)


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


def head_logits(model: DecoderWeights, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """[R, V] float32 from [R, D] after the final norm. Logits are never rounded to fewer bits, which would create ties."""
    return model.expand_logits(product(rows, model.head, out_dtype=torch.float32, out=out))
