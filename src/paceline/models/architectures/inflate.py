"""A small Llama inside a larger Llama shape that computes the same function: a large model's cost with a real one's text.

Hidden size d grows to D by zeros in the embedding, and stays zero there because no matrix writes the new dimensions:

    norms    weight * sqrt(d/D), epsilon * d/D          the mean of squares is over D, of which d are not zero
    heads    old KV heads and their query groups become the first new ones; rotary pair i moves to pair i * hd/e,
             which turns at the same frequency; q * sqrt(hd/e) undoes the new softmax scale
    output   rows and columns of o_proj and down_proj that are not the small model's are zero
    layers   further ones compute attention and feed-forward of random numbers, and write nothing

Everything else is random numbers that cannot reach the output. Matrices are made one by one, when asked for, on the
device that will hold them: a 70B never exists in host memory.
"""

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import Dense
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.inflation import SHAPES, Inflation, Shape
from paceline.models.architectures.rope import FrequencyFactors
from paceline.models.loading.checkpoint import Checkpoint, Weights

FILLER_DEVIATION = 0.02
NOISY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def inflate(small: Checkpoint, what: Inflation, device: torch.device | str, dtype: torch.dtype) -> Checkpoint:
    """The large checkpoint; its matrices are made on `device` in `dtype` as they are asked for."""
    config = inflated_config(small.config, SHAPES[what.shape])
    weights = InflatedWeights(small.config, small.weights, config, what, torch.device(device), dtype)
    name = f"{what.shape}-{small.name}" + (f"-noise-{what.noise:g}" if what.noise else "")
    return Checkpoint(name, config, weights, small.read_tokenizer)


def inflated_config(small: ModelConfig, shape: Shape) -> ModelConfig:
    if small.architecture not in ("llama", "mistral") or small.attention_bias or small.qk_norm:
        raise UnsupportedModel(f"{small.architecture} models cannot be inflated: take one of the Llama family")
    sizes = (
        ("hidden size", small.hidden_size, shape.hidden_size),
        ("feed-forward size", small.ffn_size, shape.ffn_size),
        ("key-value heads", small.num_kv_heads, shape.num_kv_heads),
        ("heads of a key-value head", small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads),
    )
    for what, have, room in sizes:
        if have > room:
            raise UnsupportedModel(f"the small model has {what} {have} and the shape {room}: choose a larger shape")
    if shape.head_dim % small.head_dim:
        raise UnsupportedModel(
            f"heads of {small.head_dim} do not fit evenly into heads of {shape.head_dim}: choose another shape"
        )
    scaling, spread = small.rope_scaling, shape.head_dim // small.head_dim
    if isinstance(scaling, FrequencyFactors):
        scaling = FrequencyFactors(tuple(factor for factor in scaling.factors for _ in range(spread)))
    return replace(
        small,
        hidden_size=shape.hidden_size,
        num_layers=max(shape.num_layers, small.num_layers),
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        rms_eps=small.rms_eps * small.hidden_size / shape.hidden_size,
        rope_scaling=scaling,
        tie_embeddings=False,  # the embedding is zero where the head is filler
    )


class InflatedWeights:
    """`Weights` of the large model."""

    def __init__(
        self,
        small: ModelConfig,
        weights: Weights,
        config: ModelConfig,
        what: Inflation,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._small, self._weights, self._config, self._what = small, weights, config, what
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
            values = self._filler(name, config.vocab_size, config.hidden_size)
            values[:, :width] = self._real("model.embed_tokens.weight" if small.tie_embeddings else name, role)
        elif role in ("gate_proj", "up_proj"):
            values = self._filler(name, config.ffn_size, config.hidden_size)
            if self._is_real(name):
                values[: small.ffn_size, :width] = self._real(name, role)
        elif role == "down_proj":
            values = self._zeros(config.hidden_size, config.ffn_size)
            if self._is_real(name):
                values[:width, : small.ffn_size] = self._real(name, role)
        elif role == "o_proj":
            values = self._zeros(config.hidden_size, config.q_size)
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
        values = self._filler(name, count * config.head_dim, config.hidden_size)
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
            heads[head] = 0  # a dimension with another frequency adds nothing to the score
            heads[head].index_copy_(0, dims, source.to(self._dtype))
        return values

    def _query_heads(self) -> Tensor:
        """[h] new place of each old query head: the first of the group of its key-value head."""
        small, config = self._small, self._config
        group, room = small.num_heads // small.num_kv_heads, config.num_heads // config.num_kv_heads
        old = torch.arange(small.num_heads, device=self._device)
        return old // group * room + old % group

    def _rotary_dims(self) -> Tensor:
        """[e] new place of each old dimension of a head: both halves of a pair, spread to the same frequency."""
        small, config = self._small.head_dim, self._config.head_dim
        pairs = torch.arange(small // 2, device=self._device) * (config // small)
        return torch.cat((pairs, config // 2 + pairs))

    def _is_real(self, name: str) -> bool:
        """Whether the small model has this weight; its layers are the first."""
        parts = name.split(".")
        return parts[1] != "layers" or int(parts[2]) < self._small.num_layers

    def _real(self, name: str, role: str) -> Tensor:
        """The small model's matrix with its noise, drawn on the CPU: the same on every device."""
        values = self._weights.matrix(name).dequantize()
        if self._what.noise and role in NOISY:
            generator = torch.Generator().manual_seed(self._seed(name, "noise"))
            values = values + self._what.noise * values.std() * torch.randn(values.shape, generator=generator)
        return values.to(self._device)

    def _filler(self, name: str, outputs: int, inputs: int) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seed(name, "filler"))
        values = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return values.normal_(0.0, FILLER_DEVIATION, generator=generator)

    def _zeros(self, outputs: int, inputs: int) -> Tensor:
        return torch.zeros(outputs, inputs, dtype=self._dtype, device=self._device)

    def _seed(self, name: str, purpose: str) -> int:
        """Of the name, so that the order in which matrices are asked for does not matter."""
        digest = hashlib.sha256(f"{self._what.seed} {purpose} {name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1
