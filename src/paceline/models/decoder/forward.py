"""The decoder of all supported families. Inference only; call it under `torch.inference_mode`.

A pass computes the rows of many sequences at once. `AttentionLayout` gives where each row's keys and values are stored and
which rows it attends to. The model does not distinguish prompt tokens, decoded tokens and drafts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.attention import HEAD_MULTIPLE
from paceline.kernels.cpu.decoder import DecoderLayers, DecoderPass, DecoderShape, LayerWeights, ModelWeights
from paceline.kernels.formats.layout import AttentionLayout, uses_gpu_kernels
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.models.decoder.decoder import AfterLayer, DecoderWeights, ForwardOutput


class DecoderModel(DecoderWeights):
    _native: tuple[Sequence[tuple[Tensor, Tensor]], DecoderLayers | None, DecoderPass | None] | None = None
    """Cache of the last pass, and the layers and the pass joined over it."""

    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, rotary; siblings of a tree share one
        layout: AttentionLayout,
        cache: Sequence[tuple[Tensor, Tensor]],  # per layer: keys, values, each [num_blocks, 16, KV, hd]
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
        eps = self.config.rms_eps
        rotary = [(cos[positions], sin[positions]) for cos, sin in self.rotary]  # [T, hd / 2] each
        hidden = self.embed(tokens)  # [T, D]
        inner: dict[int, Tensor] = {}
        normed = rms_norm(hidden, self.layers[0].input_norm, eps)
        native_layers = self._native_layers(cache) if after_layer is None else None
        if native_layers is not None:
            inner.update(native_layers.run(hidden, normed, rotary, layout, state_layers))
        else:
            triples = zip(self.layers, self.norms_after, cache, strict=True)
            for i, (layer, next_norm, (keys, values)) in enumerate(triples):
                if i in state_layers:
                    inner[i] = hidden
                attended = layer.attention(normed, rotary, layout, keys, values)
                normed, hidden = add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
                normed, hidden = add_rms_norm(layer.feed_forward(normed), hidden, next_norm, eps)
                if after_layer is not None:
                    after_layer(i)
        if self.config.num_layers in state_layers:
            inner[self.config.num_layers] = hidden

        logits = None
        if logit_rows is not None and len(logit_rows):
            logits = self.logits(normed[logit_rows])
        return ForwardOutput(logits, normed if last_hidden else None, inner)

    def native_pass(self, cache: Sequence[tuple[Tensor, Tensor]]) -> DecoderPass | None:
        """A whole pass over `cache` as one native call; None if a part of it needs its own call."""
        known = self._native
        if known is None or known[0] is not cache:
            self._native_layers(cache)
            known = self._native
        return None if known is None else known[2]

    def _native_layers(self, cache: Sequence[tuple[Tensor, Tensor]]) -> DecoderLayers | None:
        """All layers over `cache` as one native call; None if a part of them needs its own call."""
        known = self._native
        if known is None or known[0] is not cache:
            if not self.is_complete:  # a pass waits for each layer
                return None
            layers = self._join_layers(cache)
            known = self._native = (cache, layers, None if layers is None else self._join_pass(layers))
        return known[1]

    def _join_pass(self, layers: DecoderLayers) -> DecoderPass | None:
        tables = self.embedding, self.head
        packed = tuple(table for table in tables if isinstance(table, PackedWeight))
        if len(packed) < len(tables) or not (self.has_plain_embedding and self.has_plain_logits):
            return None
        first_norm = self.layers[0].input_norm
        return DecoderPass(layers, ModelWeights(packed[0], packed[1], first_norm, self.rotary))

    def _join_layers(self, cache: Sequence[tuple[Tensor, Tensor]]) -> DecoderLayers | None:
        c, heads, layers = self.config, self.config.heads, []
        if heads.head_dim % HEAD_MULTIPLE:
            return None
        for layer, next_norm, (keys, values) in zip(self.layers, self.norms_after, cache, strict=True):
            matrices = [layer.qkv, layer.output, layer.gate_up, layer.down]
            packed = tuple(matrix for matrix in matrices if isinstance(matrix, PackedWeight))
            is_native = len(packed) == 4 and (layer.experts is None or layer.experts.address is not None)
            if not is_native or layer.reduce is not None or keys.dtype is not torch.float32:
                return None
            layers.append(
                LayerWeights(
                    packed[0],
                    packed[1],
                    packed[2],
                    packed[3],
                    experts=layer.experts,
                    qkv_bias=layer.qkv_bias,
                    output_bias=layer.output_bias,
                    q_norm=layer.q_norm,
                    k_norm=layer.k_norm,
                    sinks=layer.sinks,
                    attention_norm=layer.attention_norm,
                    feed_forward_norm=layer.feed_forward_norm,
                    post_attention_norm=layer.post_attention_norm,
                    next_norm=next_norm,
                    keys=keys,
                    values=values,
                    window=layer.spec.window,
                    rotary=layer.spec.rotary,
                )
            )
        shape = DecoderShape(
            c.hidden_size, c.ffn_size, heads.num, heads.num_kv, heads.head_dim, c.ffn.activation, c.rms_eps, heads.scale
        )
        return DecoderLayers(shape, layers)
