"""A pass of `DecoderModel` on a GPU. Few rows: five fused kernels a layer. Many rows: the vendor's matrix products.

Nothing here waits for the device or decides by what is on it, so a CUDA graph can hold a whole pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear as dense_linear

from paceline.kernels.gpu.activation import silu_mul
from paceline.kernels.gpu.attention import paged_attention
from paceline.kernels.gpu.attention_plan import AttentionPlan, AttentionScratch, attention_plan
from paceline.kernels.gpu.linear import MAX_ROWS, Normed, add_linear, embed, gate_up, linear, qkv_rotary_store
from paceline.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.gpu.rotary import rotate_and_store
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.linear import DenseWeight, LinearWeight
from paceline.models.architectures.output import ForwardOutput

if TYPE_CHECKING:
    from paceline.models.architectures.llama import AfterLayer, DecoderModel


def plan_pass(
    model: "DecoderModel", rows: int, sequences: int, max_rows: int, scratch: AttentionScratch | None = None
) -> AttentionPlan:
    """How attention is cut up for passes of this size; make it once for each size that recurs."""
    c = model.config
    heads = c.num_heads, c.num_kv_heads, c.head_dim
    return attention_plan(rows, sequences, max_rows, *heads, model.device, scratch=scratch)


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """What `gpu_forward` was asked for."""

    tokens: Tensor
    positions: Tensor
    layout: AttentionLayout
    cache: Sequence[tuple[Tensor, Tensor]]
    logit_rows: Tensor | None
    capture: tuple[int, ...]
    last_hidden: bool
    plan: AttentionPlan
    after_layer: "AfterLayer | None"
    room: Tensor | None
    attended: Tensor | None


def gpu_forward(
    model: "DecoderModel",
    tokens: Tensor,  # [T] int64
    positions: Tensor,  # [T] int64
    layout: AttentionLayout,
    cache: Sequence[tuple[Tensor, Tensor]],
    logit_rows: Tensor | None,  # [R] int64
    capture: tuple[int, ...] = (),
    last_hidden: bool = False,
    plan: AttentionPlan | None = None,
    after_layer: "AfterLayer | None" = None,
    room: Tensor | None = None,  # [R, V] float32
    attended: Tensor | None = None,  # [T, H * hd]
) -> ForwardOutput:
    """As `DecoderModel.forward`, which calls it. `plan` None: made for this pass alone. `room`: where logits are written;
    `attended`: where every layer's attention is, which leaves rows of no sequence as they are."""
    plan = plan or plan_pass(model, len(tokens), len(layout.context_lens), len(tokens))
    is_fused = len(tokens) <= MAX_ROWS and not model.config.qk_norm and model.layers[0].reduce is None
    asked = _Pass(tokens, positions, layout, cache, logit_rows, capture, last_hidden, plan, after_layer, room, attended)
    return _few_rows(model, asked) if is_fused else _many_rows(model, asked)


def _few_rows(model: "DecoderModel", asked: _Pass) -> ForwardOutput:
    config, inner = model.config, {}
    hidden, normed = _enter(model, asked.tokens)
    for i, (layer, next_norm, (keys, values)) in enumerate(
        zip(model.layers, model.norms_after, asked.cache, strict=True)
    ):
        if i in asked.capture:
            inner[i] = hidden
        q = qkv_rotary_store(
            normed,
            layer.qkv,
            layer.qkv_bias,
            model.cos,
            model.sin,
            asked.positions,
            asked.layout.slots,
            keys,
            values,
            config.num_heads,
        )
        attended = _attend(model, q, keys, values, asked)
        hidden, normed = add_linear(attended, layer.output, hidden, layer.post_attention_norm, config.rms_eps)
        gated = gate_up(normed, layer.gate_up)
        hidden, normed = add_linear(gated, layer.down, hidden, next_norm, config.rms_eps)
        if asked.after_layer is not None:
            asked.after_layer(i)
    if config.num_layers in asked.capture:
        inner[config.num_layers] = hidden
    last = _finish(normed) if asked.last_hidden else None
    logits, wanted = None, asked.logit_rows
    if wanted is not None and len(wanted):
        if len(wanted) < len(asked.tokens):
            normed = Normed(normed.scaled[wanted], normed.squares[wanted], normed.eps)
        logits = model.spread(linear(normed, model.head, out_dtype=torch.float32, out=asked.room))
    return ForwardOutput(logits, last, inner)


def _many_rows(model: "DecoderModel", asked: _Pass) -> ForwardOutput:
    eps, inner = model.config.rms_eps, {}
    where = asked.layout.starts, asked.layout.context_lens, asked.layout.block_tables
    hidden = model.embed(asked.tokens)
    normed = rms_norm(hidden, model.layers[0].input_norm, eps)
    for i, (layer, next_norm, (keys, values)) in enumerate(
        zip(model.layers, model.norms_after, asked.cache, strict=True)
    ):
        if i in asked.capture:
            inner[i] = hidden
        qkv = _product(normed, layer.qkv, layer.qkv_bias)
        if model.config.qk_norm:
            layer.norm_heads(qkv)
        q = rotate_and_store(qkv, asked.positions, model.cos, model.sin, keys, values, *where)
        attended = _product(_attend(model, q, keys, values, asked), layer.output)
        normed, hidden = add_rms_norm(layer.whole(attended), hidden, layer.post_attention_norm, eps)
        fed = _product(silu_mul(_product(normed, layer.gate_up)), layer.down)
        normed, hidden = add_rms_norm(layer.whole(fed), hidden, next_norm, eps)
        if asked.after_layer is not None:
            asked.after_layer(i)
    if model.config.num_layers in asked.capture:
        inner[model.config.num_layers] = hidden
    logits, wanted = None, asked.logit_rows
    if wanted is not None and len(wanted):
        rows = normed if len(wanted) == len(asked.tokens) else normed[wanted]
        logits = head_logits(model, rows, asked.room)
    return ForwardOutput(logits, normed if asked.last_hidden else None, inner)


def _attend(model: "DecoderModel", q: Tensor, keys: Tensor, values: Tensor, asked: _Pass) -> Tensor:
    """[T, H * hd]"""
    config, layout = model.config, asked.layout
    return paged_attention(
        q, keys, values, layout.starts, layout.context_lens, layout.block_tables, asked.plan,
        config.head_dim**-0.5, layout.ancestors, config.sliding_window, asked.attended,
    )  # fmt: skip


def _enter(model: "DecoderModel", tokens: Tensor) -> tuple[Tensor, Normed]:
    """The rows that enter layer 0, and the same on their way through its norm."""
    norm, eps = model.layers[0].input_norm, model.config.rms_eps
    if model.embeds_plainly and isinstance(model.embedding, DenseWeight):
        return embed(tokens, model.embedding.values, norm, eps)
    rows = model.embed(tokens)
    return embed(torch.arange(len(rows), device=rows.device), rows, norm, eps)


def _finish(normed: Normed) -> Tensor:
    """[T, D] after the norm."""
    mean = normed.squares.sum(1, keepdim=True) / normed.scaled.shape[1]
    return (normed.scaled.float() * torch.rsqrt(mean + normed.eps)).to(normed.scaled.dtype)


def head_logits(model: "DecoderModel", rows: Tensor, room: Tensor | None = None) -> Tensor:
    """[R, V] float32 from [R, D] after the final norm, never rounded to fewer bits on the way: tokens that tie after rounding
    did not tie before."""
    head = model.head
    if len(rows) > MAX_ROWS and rows.is_cuda and rows.dtype is not torch.float32 and isinstance(head, DenseWeight):
        weight = head.values.t()
        if room is None:
            return model.spread(torch.mm(rows, weight, out_dtype=torch.float32))
        return model.spread(torch.mm(rows, weight, out_dtype=torch.float32, out=room))
    return model.spread(linear(rows, head, out_dtype=torch.float32, out=room))


def _product(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """x [T, K] -> [T, N], for any number of rows."""
    if isinstance(weight, DenseWeight):
        return dense_linear(x, weight.values, bias)
    return linear(x, weight, bias)
