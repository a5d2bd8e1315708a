"""The operations of a pass in the native CPU kernels, which compute all layers, or a whole pass, in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, float32

from paceline.kernels.attention import HEAD_MULTIPLE
from paceline.kernels.cpu.decoder import DecoderLayers, DecoderPass, DecoderShape, LayerWeights, ModelWeights
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.packing import PackedWeight
from paceline.models.decoder.decoder import DecoderWeights, Layer
from paceline.models.decoder.ops import LayerCache, TorchOps


class CpuOps(TorchOps):
    """The operations on a CPU of a model whose layers are one native call."""

    def __init__(
        self,
        layers: DecoderLayers,
        rotary: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        layout: AttentionLayout,
        rms_eps: float,
    ) -> None:
        super().__init__(rotary, positions, layout, rms_eps)
        self._layers = layers

    def all_layers(self, hidden: Tensor, normed: Tensor, state_layers: Sequence[int]) -> Mapping[int, Tensor]:
        return self._layers.run(hidden, normed, self.rotary, self.layout, state_layers)


@dataclass(frozen=True, slots=True, eq=False)
class NativeCalls:
    """The native calls of a model over one cache."""

    layers: DecoderLayers | None = None
    """All layers. None if a part of them needs its own call."""
    whole: DecoderPass | None = None
    """A whole pass. None if a part of it needs its own call."""


def native_calls(model: DecoderWeights, cache: Sequence[LayerCache]) -> NativeCalls:
    """Joins the weights of the model and the memory of the cache."""
    joined = []
    for layer, next_norm, of_layer in zip(model.layers, model.norms_after, cache, strict=True):
        part = native_layer(layer, next_norm, of_layer)
        if part is None:
            return NativeCalls()
        joined.append(part)
    layers = DecoderLayers(joined[0][0], [weights for _, weights in joined])
    tables = model.embedding, model.head
    packed = [table for table in tables if isinstance(table, PackedWeight)]
    if len(packed) < len(tables) or not (model.has_plain_embedding and model.has_plain_logits):
        return NativeCalls(layers)
    first_norm = model.layers[0].input_norm
    return NativeCalls(layers, DecoderPass(layers, ModelWeights(packed[0], packed[1], first_norm, model.rotary)))


def native_layer(layer: Layer, next_norm: Tensor, cache: LayerCache) -> tuple[DecoderShape, LayerWeights] | None:
    """The layer as native calls read it. None if a part of it needs its own call."""
    config, heads, (keys, values) = layer.config, layer.spec.attention, cache
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    packed = tuple(matrix for matrix in matrices if isinstance(matrix, PackedWeight))
    is_native = len(packed) == len(matrices) and (layer.experts is None or layer.experts.address is not None)
    if not is_native or heads.head_dim % HEAD_MULTIPLE or layer.reduce is not None or keys.dtype is not float32:
        return None
    shape = DecoderShape(
        config.hidden_size,
        layer.spec.ffn.width,
        heads.num,
        heads.num_kv,
        heads.head_dim,
        layer.spec.ffn.activation,
        config.rms_eps,
        heads.scale,
    )
    weights = LayerWeights(
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
    return shape, weights
