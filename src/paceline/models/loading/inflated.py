"""Inflation: a small Llama inside the shape of a large Llama, computing the same function. It has the cost of the large model
and the text of the small one.

The embedding pads hidden size d to D with zeros. They stay zero because no matrix writes the new dimensions:

    norms    weight * sqrt(d/D), epsilon * d/D          the mean of squares is over D values, d of them not zero
    heads    old KV heads and their query groups become the first new ones; rotary pair i moves to pair i * hd/e,
             which has the same frequency; q * sqrt(hd/e) compensates for the new softmax scale
    output   rows and columns of o_proj and down_proj outside the small model are zero
    layers   further layers compute attention and feed-forward of random numbers, and add nothing

All other weights are random numbers that cannot affect the output. Matrices are generated one by one on their device, so that
a 70B model is never in host memory.
"""

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense
from paceline.kernels.rope import FrequencyFactors
from paceline.model_files.hub import SHAPES, InflatedShape, Inflation
from paceline.models.families.layers import DenseFeedForward, Heads, LayerSpec
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights import Checkpoint, Weights

RANDOM_DEVIATION = 0.02
NOISY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def inflate(small: Checkpoint, inflation: Inflation, device: torch.device | str, dtype: torch.dtype) -> Checkpoint:
    """The inflated checkpoint. Its matrices are generated on demand, on `device` in `dtype`."""
    config = inflated_config(small.config, SHAPES[inflation.shape])
    weights = InflatedWeights(small.config, small.weights, config, inflation, torch.device(device), dtype)
    name = f"{inflation.shape}-{small.name}" + (f"-noise-{inflation.noise:g}" if inflation.noise else "")
    return Checkpoint(name, config, weights, small.read_tokenizer)


def inflated_config(small: DecoderSpec, shape: InflatedShape) -> DecoderSpec:
    if not _is_llama(small):
        raise UnsupportedModel(f"{small.architecture} models cannot be inflated: use a Llama model")
    sizes = (
        ("hidden size", small.hidden_size, shape.hidden_size),
        ("feed-forward size", small.ffn_size, shape.ffn_size),
        ("key-value heads", small.num_kv_heads, shape.num_kv_heads),
        ("heads per key-value head", small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads),
    )
    for name, size, limit in sizes:
        if size > limit:
            raise UnsupportedModel(f"the small model has {name} {size} and the shape {limit}: choose a larger shape")
    if shape.head_dim % small.head_dim:
        raise UnsupportedModel(
            f"heads of {small.head_dim} do not fit evenly into heads of {shape.head_dim}: choose another shape"
        )
    rotary, spread = small.rotary[0], shape.head_dim // small.head_dim
    scaling = rotary.scaling
    if isinstance(scaling, FrequencyFactors):
        scaling = FrequencyFactors(tuple(factor for factor in scaling.factors for _ in range(spread)))
    layer = small.layers[0]
    heads = replace(layer.attention, num=shape.num_heads, num_kv=shape.num_kv_heads, head_dim=shape.head_dim)
    layer = replace(layer, attention=heads, ffn=replace(layer.ffn, width=shape.ffn_size))
    return replace(
        small,
        hidden_size=shape.hidden_size,
        layers=(layer,) * max(shape.num_layers, small.num_layers),
        rms_eps=small.rms_eps * small.hidden_size / shape.hidden_size,
        rotary=(replace(rotary, size=shape.head_dim, scaling=scaling),),
        tie_embeddings=False,  # the embedding is zero in columns where the head is random
    )


def _is_llama(config: DecoderSpec) -> bool:
    """Whether the layers compute what those of Llama compute, with or without a window."""
    heads, ffn = config.heads, config.ffn
    plain = LayerSpec(
        Heads(heads.num, heads.num_kv, heads.head_dim), DenseFeedForward(ffn.width), window=config.layers[0].window
    )
    is_scaled = config.embedding_scale != 1.0 or config.residual_scale != 1.0 or not config.has_plain_logits
    return config.layers[0] == plain and [rotary.num_rotated for rotary in config.rotary] == [None] and not is_scaled


class InflatedWeights:
    """`Weights` of the inflated model."""

    def __init__(
        self,
        small: DecoderSpec,
        weights: Weights,
        config: DecoderSpec,
        inflation: Inflation,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._small, self._weights, self._config, self._inflation = small, weights, config, inflation
        self._device, self._dtype = device, dtype

    def names(self) -> frozenset[str]:
        outer = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
        attention = (f"self_attn.{part}_proj" for part in "qkvo")
        parts = (*attention, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm")
        inner = (*parts, "post_attention_layernorm")
        layers = range(self._config.num_layers)
        return frozenset((*outer, *(f"model.layers.{i}.{part}.weight" for i in layers for part in inner)))

    def vector(self, name: str) -> Tensor:
        values = torch.ones(self._config.hidden_size)
        if self._is_real(name):
            width = self._small.hidden_size
            values[:width] = self._weights.vector(name) * math.sqrt(width / self._config.hidden_size)
        return values

    def matrix(self, name: str) -> Dense:
        small, config, role = self._small, self._config, name.split(".")[-2]
        width = small.hidden_size
        if role == "embed_tokens":
            values = self._zeros(config.vocab_size, config.hidden_size)
            values[:, :width] = self._real(name, role)
        elif role == "lm_head":
            values = self._random(name, config.vocab_size, config.hidden_size)
            values[:, :width] = self._real("model.embed_tokens.weight" if small.tie_embeddings else name, role)
        elif role in ("gate_proj", "up_proj"):
            values = self._random(name, config.ffn_size, config.hidden_size)
            if self._is_real(name):
                values[: small.ffn_size, :width] = self._real(name, role)
        elif role == "down_proj":
            values = self._zeros(config.hidden_size, config.ffn_size)
            if self._is_real(name):
                values[:width, : small.ffn_size] = self._real(name, role)
        elif role == "o_proj":
            values = self._zeros(config.hidden_size, config.heads.q_size)
            if self._is_real(name):
                heads = values.view(config.hidden_size, config.num_heads, config.head_dim)
                real = self._real(name, role).view(width, small.num_heads, small.head_dim)
                heads[:width, :, : small.head_dim].index_copy_(1, self._query_heads(), real.to(self._dtype))
        else:
            values = self._projection(name, role)
        return Dense(values)

    def _projection(self, name: str, role: str) -> Tensor:
        """q, k or v: [heads * hd, D]."""
        small, config = self._small, self._config
        is_query = role == "q_proj"
        count, real_count = (
            (config.num_heads, small.num_heads) if is_query else (config.num_kv_heads, small.num_kv_heads)
        )
        values = self._random(name, count * config.head_dim, config.hidden_size)
        if not self._is_real(name):
            return values
        heads = values.view(count, config.head_dim, config.hidden_size)[:, :, : small.hidden_size]
        real = self._real(name, role).view(real_count, small.head_dim, small.hidden_size)
        where = self._query_heads() if is_query else torch.arange(real_count, device=self._device)
        if role == "v_proj":
            for head, source in zip(where.tolist(), real, strict=True):
                heads[head, : small.head_dim] = source
            return values
        if is_query:
            real = real * math.sqrt(config.head_dim / small.head_dim)
        dims = self._rotary_dims()
        for head, source in zip(where.tolist(), real, strict=True):
            heads[head] = 0  # dimensions with other frequencies must not change the score
            heads[head].index_copy_(0, dims, source.to(self._dtype))
        return values

    def _query_heads(self) -> Tensor:
        """[h] new index of each old query head: the first heads in the group of its key-value head."""
        small, config = self._small, self._config
        group, new_group = small.num_heads // small.num_kv_heads, config.num_heads // config.num_kv_heads
        old = torch.arange(small.num_heads, device=self._device)
        return old // group * new_group + old % group

    def _rotary_dims(self) -> Tensor:
        """The new index [e] of each old dimension of a head. The two halves of a pair move to the pair with the same
        frequency."""
        small, config = self._small.head_dim, self._config.head_dim
        pairs = torch.arange(small // 2, device=self._device) * (config // small)
        return torch.cat((pairs, config // 2 + pairs))

    def _is_real(self, name: str) -> bool:
        """Whether the small model has this weight; its layers come first."""
        parts = name.split(".")
        return parts[1] != "layers" or int(parts[2]) < self._small.num_layers

    def _real(self, name: str, role: str) -> Tensor:
        """The small model's matrix plus noise. The noise is drawn on the CPU, so that it is the same on every device."""
        values = self._weights.matrix(name).dequantize()
        if self._inflation.noise and role in NOISY:
            generator = torch.Generator().manual_seed(self._seed(name, "noise"))
            values = values + self._inflation.noise * values.std() * torch.randn(values.shape, generator=generator)
        return values.to(self._device)

    def _random(self, name: str, outputs: int, inputs: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seed(name, "filler"))
        values = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, RANDOM_DEVIATION, generator=generator)

    def _zeros(self, outputs: int, inputs: int) -> Tensor:
        return torch.zeros(outputs, inputs, dtype=self._dtype, device=self._device)

    def _seed(self, name: str, purpose: str) -> int:
        """A seed per name, so that the order of generation does not matter."""
        digest = hashlib.sha256(f"{self._inflation.seed} {purpose} {name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
