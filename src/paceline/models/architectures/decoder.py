"""Weights of a decoder as a pass reads them: fused matrices on a device, norms, and the rotary table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.kernels.activation import silu_mul
from paceline.kernels.attention import paged_attention
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.linear import DenseWeight, LinearWeight, embedding_rows, linear, prepare
from paceline.kernels.quantized import QuantizedWeight
from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.rotary import apply_rotary_and_store
from paceline.kernels.weights import Dense, concat
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.rope import rotary_table
from paceline.models.loading.checkpoint import Weights
from paceline.models.loading.staged_copy import StagedCopies, in_threads

Reduce = Callable[[Tensor], Tensor]
AfterLayer = Callable[[int], None]
"""Called with a layer's number once its keys and values are stored; on a GPU, once that work is in the stream."""
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """Result of a pass over T rows, of which R have logits; D is the hidden size."""

    logits: Tensor | None  # [R, V] float32; None if R is 0
    last_hidden: Tensor | None  # [T, D], after the final norm; None unless requested
    inner: Mapping[int, Tensor]  # layer -> [T, D], the hidden state that enters it


class DecoderWeights(nn.Module):
    """Everything of a decoder but its forward pass."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        tables: tuple[LinearWeight, LinearWeight] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        """`tables`: embedding and head of another model, for a checkpoint without them. `reduce`: the sum over all ranks of
        their parts of a layer's output, if `weights` are the share of one rank."""
        super().__init__()
        self.config, self.device, self.dtype = config, device, dtype
        load = Loader(weights, device, dtype)
        if tables is not None:
            self.embedding, self.head = tables
        else:
            self.embedding = load.matrix("model.embed_tokens")
            self.head = self.embedding if config.tie_embeddings else load.matrix("lm_head")
        self.layers = in_threads(
            lambda i: Layer(config, load, f"model.layers.{i}", reduce), range(config.num_layers), device
        )
        self._set_norms_and_rotary_table(load.vector("model.norm.weight"))

    def _set_norms_and_rotary_table(self, final_norm: Tensor) -> None:
        config = self.config
        # The norm after each layer: the first norm of the next layer, and the final one after the last.
        self.norms_after = [*(layer.input_norm for layer in self.layers[1:]), final_norm]
        cos, sin = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    @property
    def is_complete(self) -> bool:
        """Whether all weights are loaded. A pass waits for layers that are still loading."""
        return True

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices as they are stored, without norms and biases."""
        matrices = {id(m): m for m in (self.embedding, self.head)}.values()
        layers = (m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return sum(m.nbytes for m in (*matrices, *layers))

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, D]: the input of layer 0."""
        return embedding_rows(self.embedding, tokens)

    @property
    def has_plain_embedding(self) -> bool:
        """Whether the input of layer 0 is the unchanged row of the embedding."""
        return True

    def logits(self, normed: Tensor) -> Tensor:
        """[R, V] float32 from [R, D] hidden states after the final norm."""
        return self.expand_logits(linear(normed, self.head).float())

    def expand_logits(self, logits: Tensor) -> Tensor:
        """[R, V] from the head's output, which covers a part of V in a draft with a reduced vocabulary."""
        return logits


class Layer:
    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor
    k_norm: Tensor
    qkv_bias: Tensor | None = None
    qkv: LinearWeight
    output: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight

    def __init__(self, config: ModelConfig, load: "Loader", prefix: str, reduce: Reduce | None = None) -> None:
        self.config = config
        self.reduce = reduce
        vars(self).update(layer_vectors(config, load, prefix))
        vars(self).update(layer_matrices(load, prefix))

    def attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout, keys: Tensor, values: Tensor
    ) -> Tensor:
        """[T, D] -> [T, D]"""
        heads, kv_heads, head_dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = linear(x, self.qkv, self.qkv_bias)  # [T, (H + 2 KV) hd]
        if self.config.qk_norm:
            self.norm_heads(qkv)
        q = apply_rotary_and_store(qkv, cos, sin, keys, values, layout.slots, heads, kv_heads)  # [T, H, hd]
        attended = paged_attention(q, keys, values, layout, head_dim**-0.5, self.config.sliding_window)  # [T, H hd]
        return self.sum_over_ranks(linear(attended, self.output))

    def feed_forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        return self.sum_over_ranks(linear(silu_mul(linear(x, self.gate_up)), self.down))

    def sum_over_ranks(self, partial: Tensor) -> Tensor:
        return partial if self.reduce is None else self.reduce(partial)

    def norm_heads(self, qkv: Tensor) -> None:
        """RMS norm of each head of q and k, in place."""
        heads = qkv.view(len(qkv), -1, self.config.head_dim)  # [T, H + 2 KV, hd]
        num_q, num_kv = self.config.num_heads, self.config.num_kv_heads
        for part, weight in ((heads[:, :num_q], self.q_norm), (heads[:, num_q : num_q + num_kv], self.k_norm)):
            rows = part.reshape(-1, self.config.head_dim).contiguous()  # with one head, reshape returns a strided view
            part.copy_(rms_norm(rows, weight, self.config.rms_eps).view_as(part))


def layer_vectors(config: ModelConfig, load: "Loader", prefix: str) -> dict[str, Tensor]:
    """Norms and biases of a layer, by attribute name."""
    attention = f"{prefix}.self_attn"
    vectors = {
        "input_norm": load.vector(f"{prefix}.input_layernorm.weight"),
        "post_attention_norm": load.vector(f"{prefix}.post_attention_layernorm.weight"),
    }
    if config.attention_bias:
        vectors["qkv_bias"] = load.vector(*(f"{attention}.{part}.bias" for part in _QKV))
    if config.qk_norm:
        vectors["q_norm"] = load.vector(f"{attention}.q_norm.weight")
        vectors["k_norm"] = load.vector(f"{attention}.k_norm.weight")
    return vectors


def layer_matrices(load: "Loader", prefix: str) -> dict[str, LinearWeight]:
    """Matrices of a layer, by attribute name."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "qkv": load.matrix(*(f"{attention}.{part}" for part in _QKV)),
        "output": load.matrix(f"{attention}.o_proj"),
        "gate_up": load.matrix(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "down": load.matrix(f"{mlp}.down_proj"),
    }


class Loader:
    """Loads weights to a device and joins the parts of a fused matrix along the output dimension."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype
        self._copies = StagedCopies(device)

    def matrix(self, *names: str) -> LinearWeight:
        parts = [self._weights.matrix(f"{name}.weight") for name in names]
        if self._device.type == "cpu" or any(isinstance(part, QuantizedWeight) for part in parts):
            return prepare(concat(parts), self._device, self._dtype)
        if len(parts) == 1 and isinstance(parts[0], Dense) and parts[0].values.device.type == self._device.type:
            return prepare(parts[0], self._device, self._dtype)
        shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        for part, rows in zip(parts, values.split([part.shape[0] for part in parts]), strict=True):
            source = part.values if isinstance(part, Dense) else part.dequantize()
            if self._device.type == "cuda" and source.device.type == "cpu":
                self._copies.copy(rows, source)
            else:
                rows.copy_(source)
        return DenseWeight(values)

    def vector(self, *names: str) -> Tensor:
        return torch.cat([self._weights.vector(name) for name in names]).to(self._device, self._dtype)
