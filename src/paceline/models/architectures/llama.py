"""The decoder: Llama 2 and 3, SmolLM2, Mistral, Qwen2 and Qwen3. Inference only; call it under `torch.inference_mode`.

A pass computes ragged rows of many sequences at once. `AttentionLayout` says where each row's keys and values go and
what it may see; nothing here knows whether a row is prompt, a decoded token or a draft.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.kernels.activation import silu_mul
from paceline.kernels.attention import paged_attention
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.linear import LinearWeight, embedding_rows, linear, prepare
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rotary import apply_rotary_and_store
from paceline.kernels.weights import concat
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.output import ForwardOutput
from paceline.models.architectures.rope import rotary_table
from paceline.models.loading.checkpoint import Weights

Reduce = Callable[[Tensor], Tensor]
AfterLayer = Callable[[int], None]
"""Called with a layer's number when its keys and values are stored; on a GPU, when that is in the stream."""
_QKV = ("q_proj", "k_proj", "v_proj")


class DecoderModel(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        tables: tuple[LinearWeight, LinearWeight] | None = None,
        reduce: Reduce | None = None,
    ) -> None:
        """`tables`: embedding and head of another model, for one that brings none of its own. `reduce`: sums what the ranks
        have each computed of a layer's output, where `weights` are one rank's share."""
        super().__init__()
        self.config, self.device, self.dtype = config, device, dtype
        load = Loader(weights, device, dtype)
        if tables is not None:
            self.embedding, self.head = tables
        else:
            self.embedding = load.matrix("model.embed_tokens")
            self.head = self.embedding if config.tie_embeddings else load.matrix("lm_head")
        self.layers = [Layer(config, load, f"model.layers.{i}", reduce) for i in range(config.num_layers)]
        self._join(load.vector("model.norm.weight"))

    def _join(self, final_norm: Tensor) -> None:
        config = self.config
        # The norm that follows each layer: the next layer's first, then the final one.
        self.norms_after = [*(layer.input_norm for layer in self.layers[1:]), final_norm]
        cos, sin = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    @property
    def is_complete(self) -> bool:
        """Whether all weights are there: a pass over those that are still on their way waits for them."""
        return True

    @property
    def weight_bytes(self) -> int:
        """Memory of all matrices as they are stored; norms and biases do not count."""
        matrices = {id(m): m for m in (self.embedding, self.head)}.values()
        layers = (m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return sum(m.nbytes for m in (*matrices, *layers))

    def forward(
        self,
        tokens: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, rotary; in a tree siblings share one
        layout: AttentionLayout,
        cache: Sequence[tuple[Tensor, Tensor]],  # per layer: keys, values, each [num_blocks, 16, KV, hd]
        logit_rows: Tensor | None = None,  # [R] int64; None or empty computes no logits
        capture: tuple[int, ...] = (),
        last_hidden: bool = False,
        after_layer: AfterLayer | None = None,
    ) -> ForwardOutput:
        """Compute T rows, store their keys and values in `cache`, and return what was asked for.

        `capture` names layers by number: layer i's entry is the hidden state after i layers, 0 being the embedding and
        `num_layers` the last one before the final norm.
        """
        if self.device.type == "cuda":
            from paceline.models.gpu.decoder import gpu_forward

            return gpu_forward(
                self, tokens, positions, layout, cache, logit_rows, capture, last_hidden, after_layer=after_layer
            )
        eps = self.config.rms_eps
        cos, sin = self.cos[positions], self.sin[positions]  # [T, hd / 2]
        inner: dict[int, Tensor] = {}

        hidden = self.embed(tokens)  # [T, D]
        normed = rms_norm(hidden, self.layers[0].input_norm, eps)
        for i, (layer, next_norm, (keys, values)) in enumerate(zip(self.layers, self.norms_after, cache, strict=True)):
            if i in capture:
                inner[i] = hidden
            attended = layer.attention(normed, cos, sin, layout, keys, values)
            normed, hidden = add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            normed, hidden = add_rms_norm(layer.feed_forward(normed), hidden, next_norm, eps)
            if after_layer is not None:
                after_layer(i)
        if self.config.num_layers in capture:
            inner[self.config.num_layers] = hidden

        logits = None
        if logit_rows is not None and len(logit_rows):
            logits = self.logits(normed[logit_rows])
        return ForwardOutput(logits, normed if last_hidden else None, inner)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, D]: what enters layer 0."""
        return embedding_rows(self.embedding, tokens)

    @property
    def embeds_plainly(self) -> bool:
        """Whether what enters layer 0 is the embedding's row as it stands."""
        return True

    def logits(self, normed: Tensor) -> Tensor:
        """[R, V] float32 from [R, D] hidden states after the final norm."""
        return self.spread(linear(normed, self.head).float())

    def spread(self, logits: Tensor) -> Tensor:
        """[R, V] from what the head gives: the same, unless its vocabulary is a part of V."""
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
        return self.whole(linear(attended, self.output))

    def feed_forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        return self.whole(linear(silu_mul(linear(x, self.gate_up)), self.down))

    def whole(self, partial: Tensor) -> Tensor:
        return partial if self.reduce is None else self.reduce(partial)

    def norm_heads(self, qkv: Tensor) -> None:
        """RMS norm of each head of q and k, in place."""
        heads = qkv.view(len(qkv), -1, self.config.head_dim)  # [T, H + 2 KV, hd]
        num_q, num_kv = self.config.num_heads, self.config.num_kv_heads
        for part, weight in ((heads[:, :num_q], self.q_norm), (heads[:, num_q : num_q + num_kv], self.k_norm)):
            rows = part.reshape(-1, self.config.head_dim).contiguous()  # of one head, reshape is a view with gaps
            part.copy_(rms_norm(rows, weight, self.config.rms_eps).view_as(part))


def layer_vectors(config: ModelConfig, load: "Loader", prefix: str) -> dict[str, Tensor]:
    """The small weights of a layer, by attribute: those that its family has."""
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
    """The large ones."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return {
        "qkv": load.matrix(*(f"{attention}.{part}" for part in _QKV)),
        "output": load.matrix(f"{attention}.o_proj"),
        "gate_up": load.matrix(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        "down": load.matrix(f"{mlp}.down_proj"),
    }


class Loader:
    """Weights on their way to the device: parts of a fused matrix joined along the output dimension."""

    def __init__(self, weights: Weights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype

    def matrix(self, *names: str) -> LinearWeight:
        return prepare(concat([self._weights.matrix(f"{name}.weight") for name in names]), self._device, self._dtype)

    def vector(self, *names: str) -> Tensor:
        return torch.cat([self._weights.vector(name) for name in names]).to(self._device, self._dtype)
