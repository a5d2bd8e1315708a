"""The forward pass of the decoder: one sequence of operations for all families and backends.

A pass computes the rows of many sequences at once. `AttentionLayout` gives where each row's keys and values are stored and
which rows it attends to. The model does not distinguish prompt tokens, decoded tokens and drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.formats.layout import AfterLayer
from paceline.models.decoder.decoder import DecoderWeights, ForwardOutput, Layer
from paceline.models.decoder.ops import LayerCache, N, Ops


@dataclass(frozen=True, slots=True, eq=False)
class DecoderInputs:
    """What a pass computes; see `DecoderModel.forward`."""

    tokens: Tensor
    cache: Sequence[LayerCache]
    logit_rows: Tensor | None
    state_layers: tuple[int, ...]
    last_hidden: bool
    after_layer: AfterLayer | None


def forward_pass(model: DecoderWeights, inputs: DecoderInputs, ops: Ops[N]) -> ForwardOutput:
    """Computes all rows. The last layer may compute only those that have logits, after it has stored the keys and values of
    all."""
    hidden, normed = ops.embed(model, inputs.tokens)
    rows = None if inputs.logit_rows is None or not len(inputs.logit_rows) else inputs.logit_rows
    states: dict[int, Tensor] = {}
    computed, num_layers = ops.all_layers(hidden, normed, inputs.state_layers), len(model.layers)
    if computed is not None:
        states.update(computed)
    else:
        narrow_layer = num_layers - 1 if _leaves_rows_out(inputs, num_layers) and ops.can_narrow(model) else None
        layers = zip(model.layers, model.norms_after, inputs.cache, strict=True)
        for i, (layer, next_norm, cache) in enumerate(layers):
            if i in inputs.state_layers:
                states[i] = hidden
            if ops.skips(model, i):
                continue
            if i != narrow_layer:
                hidden, normed = forward_layer(layer, hidden, normed, next_norm, cache, ops)
            elif rows is not None:
                hidden, normed = forward_layer(layer, hidden, normed, next_norm, cache, ops, rows)
            else:
                ops.project(normed, layer, cache)
            if inputs.after_layer is not None:
                inputs.after_layer(i)
    if num_layers in inputs.state_layers:
        states[num_layers] = hidden
    logits = None
    if rows is not None:
        logits = ops.logits(model, hidden, normed, None if len(rows) == len(hidden) else rows)
    return ForwardOutput(logits, ops.final(model, hidden, normed) if inputs.last_hidden else None, states)


def _leaves_rows_out(inputs: DecoderInputs, num_layers: int) -> bool:
    """Whether some rows are needed for their keys and values only."""
    num_logits = 0 if inputs.logit_rows is None else len(inputs.logit_rows)
    return num_logits < len(inputs.tokens) and not inputs.last_hidden and num_layers not in inputs.state_layers


def forward_layer(
    layer: Layer,
    hidden: Tensor,
    normed: N,
    next_norm: Tensor | None,
    cache: LayerCache,
    ops: Ops[N],
    rows: Tensor | None = None,
    attention: Ops[N] | None = None,
) -> tuple[Tensor, N]:
    """One layer. Returns the hidden states [T, D] after it, and the same after `next_norm`. With `rows`, it returns these rows
    only; the keys and values of all rows are stored. `attention` are the operations that attend, if their layout differs."""
    q = ops.project(normed, layer, cache)
    attended = (attention or ops).attend(q, layer, cache)
    if rows is not None:
        attended, hidden = attended[rows], hidden[rows]
    hidden, normed = ops.add_attention(attended, layer, hidden)
    return ops.add_fed(ops.feed(normed, layer), layer, hidden, next_norm)
