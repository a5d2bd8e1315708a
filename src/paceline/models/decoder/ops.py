"""The operations of a forward pass, as each backend provides them.

`passes.py` has the sequence of these operations, once for all backends. A backend has an object for each pass, which knows the
rows of the pass. `ComposedOps` builds the operations of a layer from single steps; a backend that fuses steps overrides
operations. `TorchOps` computes each step with the functions of `kernels`, in torch or in the native CPU kernels. `CpuOps` has
all layers in one native call.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from torch import Tensor, cat, float32
from torch.nn.functional import pad

from paceline.kernels.activation import gated
from paceline.kernels.attention import HEAD_MULTIPLE, paged_attention
from paceline.kernels.cpu.decoder import DecoderLayers, DecoderPass, DecoderShape, LayerWeights, ModelWeights
from paceline.kernels.experts import feed_experts
from paceline.kernels.formats.layout import AttentionLayout
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.linear import linear
from paceline.kernels.rms_norm import add_rms_norm, norm_heads, norm_joined_heads, rms_norm
from paceline.kernels.rotary import apply_rotary_and_store
from paceline.models.decoder.decoder import DecoderWeights, Layer
from paceline.models.families.layers import Latent, OwnHeads

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [num_blocks, BLOCK_SIZE, KV, hd]."""
LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed states, whatever that of the other norms is."""
N = TypeVar("N")
"""The normed hidden states of a pass. A backend may leave a part of the norm to the product that reads them."""


class Ops(Protocol[N]):
    """The operations of one pass of T rows. D is the hidden size."""

    def embed(self, model: DecoderWeights, tokens: Tensor) -> tuple[Tensor, N]:
        """The hidden states [T, D] that enter layer 0, and the same after its first norm."""
        ...

    def all_layers(self, hidden: Tensor, normed: N, state_layers: Sequence[int]) -> Mapping[int, Tensor] | None:
        """Computes all layers in one call, in place: `hidden` becomes the last state and `normed` its norm. Returns the hidden
        states that enter `state_layers`. None if each layer needs calls of its own; nothing is computed then."""
        ...

    def project(self, normed: N, layer: Layer, cache: LayerCache) -> Tensor:
        """The rotated queries [T, H, hd]. The keys and values of these rows are in the cache afterwards."""
        ...

    def attend(self, q: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        """Attention of the queries to the cache, [T, H hd]."""
        ...

    def add_attention(self, attended: Tensor, layer: Layer, hidden: Tensor) -> tuple[Tensor, N]:
        """`hidden` plus the output of attention, and the sum after the norm before the feed-forward layer."""
        ...

    def feed(self, normed: N, layer: Layer) -> Tensor:
        """The inner values of the feed-forward layer [T, F], or the output of its experts [T, D]."""
        ...

    def add_fed(self, fed: Tensor, layer: Layer, hidden: Tensor, next_norm: Tensor | None) -> tuple[Tensor, N]:
        """`hidden` plus the output of the feed-forward layer, and the sum after `next_norm`, if there is one."""
        ...

    def logits(self, model: DecoderWeights, hidden: Tensor, normed: N, rows: Tensor | None) -> Tensor:
        """Logits [R, V] in float32 of the chosen rows [R], of all rows if None, from the last states and their norm."""
        ...

    def final(self, model: DecoderWeights, hidden: Tensor, normed: N) -> Tensor:
        """[T, D]: the last states after the final norm."""
        ...

    def can_narrow(self, model: DecoderWeights) -> bool:
        """Whether the last layer may compute fewer rows than the others: the bits of a row do not depend on their number."""
        ...

    def skips(self, model: DecoderWeights, number: int) -> bool:
        """Whether another layer stands for this one, because nothing is computed and both use the same kernels."""
        ...


class ComposedOps(ABC):
    """Operations of a layer that are built from single steps."""

    @abstractmethod
    def product(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        """x [T, K] -> [T, N]"""

    @abstractmethod
    def rotate_and_store(self, qkv: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        """Applies the norms of heads and the rotation to qkv [T, (H + 2 KV) hd], stores k and v, and returns q [T, H, hd]."""

    @abstractmethod
    def attend(self, q: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        """See `Ops.attend`."""

    @abstractmethod
    def feed(self, normed: Tensor, layer: Layer) -> Tensor:
        """See `Ops.feed`."""

    @abstractmethod
    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        """The RMS norm of x [T, D]; `eps` is that of the model if None."""

    @abstractmethod
    def add_norm(self, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """x + hidden, and the RMS norm of the sum."""

    def embed(self, model: DecoderWeights, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, norm = model.embed(tokens), model.layers[0].input_norm
        return hidden, hidden.clone() if norm is None else self.norm(hidden, norm)

    def project(self, normed: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        qkv = self.product(normed, layer.qkv, layer.qkv_bias)
        if layer.spec.attention.latent is not None:
            qkv = self._expand(qkv, layer, layer.spec.attention.latent)
        if layer.spec.attention.own is not None:
            qkv = self._fill(qkv, layer, layer.spec.attention.own)
        return self.rotate_and_store(qkv, layer, cache)

    def _expand(self, joined: Tensor, layer: Layer, latent: Latent) -> Tensor:
        """The queries, keys and values of all heads [T, 3 H hd] from compressed queries, or whole ones, compressed keys and
        values, and the values of keys that turn. In each half of a head, those that turn come first."""
        heads, half = layer.spec.attention, latent.num_rotated // 2
        kept = (heads.head_dim - latent.num_rotated) // 2
        q, compressed, turning = joined.split([latent.query_rank or heads.q_size, latent.rank, latent.num_rotated], 1)
        if layer.query_norm is not None:
            q = self.product(self.norm(q.contiguous(), layer.query_norm, LATENT_EPS), layer.query_out)
        kv = self.product(self.norm(compressed.contiguous(), layer.latent_norm, LATENT_EPS), layer.kv_out)
        low, high, values = kv.unflatten(1, (heads.num, -1)).split([kept, kept, latent.value_dim], 2)
        first, second = turning.unsqueeze(1).expand(-1, heads.num, -1).split([half, half], 2)
        keys = cat((first, low, second, high), 2)
        return cat((q, keys.flatten(1), pad(values, (0, heads.head_dim - latent.value_dim)).flatten(1)), 1)

    def _fill(self, joined: Tensor, layer: Layer, own: OwnHeads) -> Tensor:
        """The heads of the cache [T, (H + 2 KV) hd] from those of the layer: normed, filled with zeros and repeated. Each half
        of a head of q and k is filled, as the halves are pairs of the rotation."""
        heads, width = layer.spec.attention, own.head_dim
        room, repeats = heads.head_dim - width, heads.num_kv // own.num_kv
        sizes = [heads.num * width, own.num_kv * width, own.num_kv * width]
        q, k, *rest = joined.split(sizes if own.has_values else sizes[:2], 1)
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        weights = layer.q_norm, layer.k_norm, layer.k_norm.new_ones(width)
        normed = [
            self.norm(part.reshape(-1, width).contiguous(), weight).view(len(joined), -1, width)
            for part, weight in zip((q, k, rest[0] if rest else k), weights, strict=True)
        ]
        turning = [pad(part.unflatten(2, (2, -1)), (0, room // 2)).flatten(2) for part in normed[:2]]
        filled = (
            turning[0],
            turning[1].repeat_interleave(repeats, 1),
            pad(normed[2], (0, room)).repeat_interleave(repeats, 1),
        )
        return cat(filled, 1).flatten(1)

    def add_attention(self, attended: Tensor, layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads = layer.spec.attention
        if heads.output_size < heads.q_size:  # the rest of each head is zeros
            width = heads.output_size // heads.num
            attended = attended.unflatten(1, (heads.num, heads.head_dim))[..., :width].flatten(1)
        output = self.product(attended, layer.output, layer.output_bias)
        return self._add(output, layer, layer.attention_norm, hidden, layer.post_attention_norm)

    def add_fed(self, fed: Tensor, layer: Layer, hidden: Tensor, next_norm: Tensor | None) -> tuple[Tensor, Tensor]:
        output = fed if layer.experts is not None else self.product(fed, layer.down)
        if layer.layer_scale is None:
            return self._add(output, layer, layer.feed_forward_norm, hidden, next_norm)
        total = self._add(output, layer, layer.feed_forward_norm, hidden, None)[0] * layer.layer_scale
        return total, total if next_norm is None else self.norm(total, next_norm)

    def _add(
        self, output: Tensor, layer: Layer, output_norm: Tensor | None, hidden: Tensor, next_norm: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output = layer.sum_over_ranks(output)
        if output_norm is not None:
            output = self.norm(output, output_norm)
        if layer.config.residual_scale != 1.0:
            output = output * layer.config.residual_scale
        if next_norm is None:
            total = output + hidden
            return total, total
        return self.add_norm(output, hidden, next_norm)

    def final(self, model: DecoderWeights, hidden: Tensor, normed: Tensor) -> Tensor:
        return normed


class TorchOps(ComposedOps):
    """The operations on a CPU, and the reference of the other backends."""

    def __init__(
        self,
        rotary: Sequence[tuple[Tensor, Tensor]],
        positions: Tensor,
        layout: AttentionLayout,
        rms_eps: float,
        query_scale: Tensor | None = None,
    ) -> None:
        """`rotary` has cos and sin [max_position, hd / 2] of each rotary table, `query_scale` the factors of queries
        [max_position]."""
        self.rotary = [(cos[positions], sin[positions]) for cos, sin in rotary]  # [T, hd / 2] each
        self._query_scale = None if query_scale is None else query_scale[positions][:, None, None]
        self.layout, self._rms_eps = layout, rms_eps

    def product(self, x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight, bias)

    def rotate_and_store(self, qkv: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        heads = layer.spec.attention
        if layer.q_norm is not None and layer.k_norm is not None and heads.own is None:
            norm = norm_joined_heads if heads.has_joined_qk_norm else norm_heads
            norm(qkv, layer.q_norm, layer.k_norm, heads.num, heads.num_kv, self._rms_eps)
        q = apply_rotary_and_store(
            qkv, *self.rotary[layer.spec.rotary], *cache, self.layout.slots, heads.num, heads.num_kv
        )
        return q if self._query_scale is None else q * self._query_scale

    def attend(self, q: Tensor, layer: Layer, cache: LayerCache) -> Tensor:
        spec = layer.spec
        return paged_attention(
            q, *cache, self.layout, spec.attention.scale, spec.window, layer.sinks, spec.attention.score_cap
        )

    def feed(self, normed: Tensor, layer: Layer) -> Tensor:
        if layer.experts is not None:
            return feed_experts(normed, layer.experts)
        return gated(linear(normed, layer.gate_up), layer.spec.ffn.activation)

    def norm(self, x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, weight, self._rms_eps if eps is None else eps)

    def add_norm(self, x: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, hidden, weight, self._rms_eps)
        return total, normed

    def logits(self, model: DecoderWeights, hidden: Tensor, normed: Tensor, rows: Tensor | None) -> Tensor:
        return model.logits(normed if rows is None else normed[rows])

    def all_layers(self, hidden: Tensor, normed: Tensor, state_layers: Sequence[int]) -> Mapping[int, Tensor] | None:
        return None

    def can_narrow(self, model: DecoderWeights) -> bool:
        return False

    def skips(self, model: DecoderWeights, number: int) -> bool:
        return False


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
    shape = max((shape for shape, _ in joined), key=lambda shape: shape.ffn_size)
    assert all(replace(other, ffn_size=shape.ffn_size) == shape for other, _ in joined)  # as `DecoderSpec` checks
    layers = DecoderLayers(shape, [weights for _, weights in joined])
    tables = model.embedding, model.head
    packed = [table for table in tables if isinstance(table, PackedWeight)]
    if len(packed) < len(tables) or not (model.has_plain_embedding and model.has_plain_logits):
        return NativeCalls(layers)
    first_norm = model.layers[0].input_norm
    return NativeCalls(layers, DecoderPass(layers, ModelWeights(packed[0], packed[1], first_norm, model.rotary)))


def native_layer(layer: Layer, next_norm: Tensor | None, cache: LayerCache) -> tuple[DecoderShape, LayerWeights] | None:
    """The layer as native calls read it. None if a part of it needs its own call."""
    config, heads, (keys, values) = layer.config, layer.spec.attention, cache
    matrices = (layer.qkv, layer.output, layer.gate_up, layer.down)
    packed = tuple(matrix for matrix in matrices if isinstance(matrix, PackedWeight))
    is_native = len(packed) == len(matrices) and (layer.experts is None or layer.experts.address is not None)
    is_known = heads.query_scale is None and heads.latent is None and not (heads.own or layer.spec.has_scale)
    is_known &= heads.head_dim % HEAD_MULTIPLE == 0
    if not (is_native and is_known) or layer.reduce is not None or keys.dtype is not float32:
        return None
    shape = DecoderShape(
        config.hidden_size,
        0 if layer.experts is not None else layer.spec.ffn.width,
        heads.num,
        heads.num_kv,
        heads.head_dim,
        layer.spec.ffn.activation,
        config.rms_eps,
        heads.scale,
        heads.score_cap,
        heads.has_joined_qk_norm,
        config.residual_scale,
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
