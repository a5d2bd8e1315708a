"""The forward pass of the decoder: one sequence of operations for all families and backends.

A pass computes the rows of many sequences at once. `AttentionLayout` gives where each row's keys and values are stored and
which rows it attends to. The model does not distinguish prompt tokens, decoded tokens and drafts. Inference only; call it under
`torch.inference_mode`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.cpu.decoder import DecoderPass
from paceline.kernels.formats.layout import AttentionLayout, uses_gpu_kernels
from paceline.models.decoder.cpu_ops import CpuOps, NativeCalls, native_calls
from paceline.models.decoder.decoder import AfterLayer, DecoderWeights, ForwardOutput, Layer
from paceline.models.decoder.ops import LayerCache, N, Ops, TorchOps


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
    hidden, normed = ops.embed(model, inputs.tokens)
    states: dict[int, Tensor] = {}
    computed = ops.all_layers(hidden, normed, inputs.state_layers)
    if computed is not None:
        states.update(computed)
    else:
        layers = zip(model.layers, model.norms_after, inputs.cache, strict=True)
        for i, (layer, next_norm, cache) in enumerate(layers):
            if i in inputs.state_layers:
                states[i] = hidden
            hidden, normed = forward_layer(layer, hidden, normed, next_norm, cache, ops)
            if inputs.after_layer is not None:
                inputs.after_layer(i)
    num_layers = len(model.layers)
    if num_layers in inputs.state_layers:
        states[num_layers] = hidden
    rows = inputs.logit_rows
    logits = ops.logits(model, normed, rows) if rows is not None and len(rows) else None
    return ForwardOutput(logits, ops.normed_states(normed) if inputs.last_hidden else None, states)


def forward_layer(
    layer: Layer, hidden: Tensor, normed: N, next_norm: Tensor, cache: LayerCache, ops: Ops[N]
) -> tuple[Tensor, N]:
    """One layer. Returns the hidden states [T, D] after it, and the same after `next_norm`."""
    q = ops.project(normed, layer, cache)
    attended = ops.attend(q, layer, cache)
    hidden, normed = ops.add_attention(attended, layer, hidden)
    return ops.add_fed(ops.feed(normed, layer), layer, hidden, next_norm)


class DecoderModel(DecoderWeights):
    _native: tuple[Sequence[LayerCache], NativeCalls] | None = None
    """Cache of the last pass, and the native calls over it."""

    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, rotary; siblings of a tree share one
        layout: AttentionLayout,
        cache: Sequence[LayerCache],
        logit_rows: Tensor | None = None,  # [R] int64; None or empty computes no logits
        state_layers: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
    ) -> ForwardOutput:
        """Compute T rows, store their keys and values in `cache`, and return the requested outputs.

        `state_layers` are layers whose hidden states are returned: entry i is the state after i layers. 0 is the embedding,
        `num_layers` the last state before the final norm.
        """
        if uses_gpu_kernels(self.device):
            from paceline.models.decoder.forward_gpu import gpu_forward

            return gpu_forward(
                self, tokens, positions, layout, cache, logit_rows, state_layers, last_hidden, after_layer=after_layer
            )
        layers = None if after_layer is not None else self._native_calls(cache).layers
        where = self.rotary, positions, layout, self.config.rms_eps
        ops = TorchOps(*where) if layers is None else CpuOps(layers, *where)
        inputs = DecoderInputs(tokens, cache, logit_rows, state_layers, last_hidden, after_layer)
        return forward_pass(self, inputs, ops)

    def native_pass(self, cache: Sequence[LayerCache]) -> DecoderPass | None:
        """A whole pass over `cache` as one native call; None if a part of it needs its own call."""
        return self._native_calls(cache).whole

    def _native_calls(self, cache: Sequence[LayerCache]) -> NativeCalls:
        known = self._native
        if known is None or known[0] is not cache:
            if not self.is_complete:  # a pass waits for each layer
                return NativeCalls()
            known = self._native = (cache, native_calls(self, cache))
        return known[1]
