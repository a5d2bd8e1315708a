"""EAGLE-3: one decoder layer over the target's hidden states and the embedding of the token that followed.

Slot i joins the hidden state of token i with the embedding of token i + 1 and predicts token i + 2. For committed tokens the
state is g = fc([h_l1; h_l2; h_l3]), three inner states of the target; for drafted ones it is the layer's own output one slot
before. Inference only; call it under `torch.inference_mode`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.activation import silu_mul
from paceline.kernels.attention import paged_attention
from paceline.kernels.layout import AttentionLayout
from paceline.kernels.linear import LinearWeight, embedding_rows, linear
from paceline.kernels.rms_norm import add_rms_norm, rms_norm
from paceline.kernels.rotary import apply_rotary_and_store
from paceline.kernels.weights import concat
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.architectures.rope import RopeScaling, rope_from_hf, rotary_table
from paceline.models.drafts.vocabulary import DraftVocabulary
from paceline.models.loading.checkpoint import Weights
from paceline.models.parallel.shared_tables import embedding_for, prepare_draft

if TYPE_CHECKING:
    from paceline.kernels.gpu.attention_plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class EagleConfig:
    capture: tuple[int, ...]
    """The target's layers whose states enter `fc`, counted as layers passed."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    norm_before_residual: bool = False
    """Whether the residual is the normed state."""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        return 2 * self.num_kv_heads * self.head_dim * bytes_per_value

    @classmethod
    def read(cls, config: Mapping[str, Any], target: ModelConfig) -> "EagleConfig":
        """From config.json, ours or as `speculators` publishes it."""
        if "speculators_model_type" in config:
            return cls._published(config, target)
        return cls(
            capture=tuple(config["capture"]),
            hidden_size=config["hidden_size"],
            num_heads=config["num_heads"],
            num_kv_heads=config["num_kv_heads"],
            head_dim=config["head_dim"],
            ffn_size=config["ffn_size"],
            rms_eps=config["rms_eps"],
            rope_theta=config["rope_theta"],
            rope_scaling=target.rope_scaling,
        )

    @classmethod
    def _published(cls, config: Mapping[str, Any], target: ModelConfig) -> "EagleConfig":
        if "norm_before_residual" not in config:
            raise UnsupportedModel("config.json does not say norm_before_residual: both ways exist, add the right one")
        layer = config["transformer_layer_config"]
        if layer.get("num_hidden_layers", 1) != 1:
            raise UnsupportedModel(f"an EAGLE head of {layer['num_hidden_layers']} layers; supported: 1")
        shape = ModelConfig.from_hf({"model_type": "llama", **layer})
        theta, scaling = rope_from_hf(layer)
        depth = target.num_layers
        return cls(
            # The published default where a checkpoint names no layers
            capture=tuple(config.get("eagle_aux_hidden_state_layer_ids") or (2, depth // 2, depth - 3)),
            hidden_size=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn_size=shape.ffn_size,
            rms_eps=shape.rms_eps,
            rope_theta=theta,
            rope_scaling=scaling,
            norm_before_residual=config["norm_before_residual"],
        )


class EagleModel:
    """The head, on its target's device and in its dtype."""

    def __init__(self, config: EagleConfig, weights: Weights, target: DecoderModel) -> None:
        if not all(0 <= layer <= target.config.num_layers for layer in config.capture):
            raise UnsupportedModel(
                f"the head wants the states after layers {config.capture}; the target has {target.config.num_layers}"
            )
        self.config, self.device, self.dtype = config, target.device, target.dtype
        self.vocabulary = DraftVocabulary.of(target, weights, config.hidden_size)
        self._weights = weights

        has_embedding = "embed_tokens.weight" in weights.names()
        d, heads = config.hidden_size, config.num_heads * config.head_dim
        shape = target.config.vocab_size, d
        self.embedding = self._matrix(shape, "embed_tokens") if has_embedding else embedding_for(target, d)
        self.fc = self._matrix((d, len(config.capture) * d), "fc")
        attention, mlp = "layers.0.self_attn", "layers.0.mlp"
        self.input_norm = self._vector("layers.0.input_layernorm")
        self.hidden_norm = self._vector("layers.0.hidden_norm")
        self.post_attention_norm = self._vector("layers.0.post_attention_layernorm")
        self.final_norm = self._vector("norm")
        shape = heads + 2 * config.num_kv_heads * config.head_dim, 2 * d
        self.qkv = self._matrix(shape, *(f"{attention}.{part}" for part in ("q_proj", "k_proj", "v_proj")))
        self.output = self._matrix((d, heads), f"{attention}.o_proj")
        self.gate_up = self._matrix((2 * config.ffn_size, d), f"{mlp}.gate_proj", f"{mlp}.up_proj")
        self.down = self._matrix((d, config.ffn_size), f"{mlp}.down_proj")
        self.weight_bytes = sum(m.nbytes for m in (self.fc, self.qkv, self.output, self.gate_up, self.down))
        self.weight_bytes += self.vocabulary.nbytes
        self.weight_bytes += 0 if self.embedding is target.embedding else self.embedding.nbytes
        cos, sin = rotary_table(config.head_dim, config.rope_theta, config.rope_scaling, target.config.max_position)
        self.cos, self.sin = cos.to(self.device), sin.to(self.device)  # [max_position, hd / 2] float32

    def fuse(self, inner: Mapping[int, Tensor]) -> Tensor:
        """g [T, D] from the target's states, each [T, D] or, in a target that contains a narrower one, wider."""
        width = self.config.hidden_size
        return linear(torch.cat([inner[layer][:, :width] for layer in self.config.capture], 1), self.fc)

    def forward(
        self,
        states: Tensor,  # [T, D]: g, or this layer's output one slot before
        tokens: Tensor,  # [T] int64: the token that followed each state
        positions: Tensor,  # [T] int64, of the states
        layout: AttentionLayout,
        cache: tuple[Tensor, Tensor],  # keys, values, each [num_blocks, 16, KV, hd]
        plan: "AttentionPlan | None" = None,
    ) -> Tensor:
        """[T, D], the state of the next slot; `logits` makes a prediction of it. `plan`: of a pass of this size, if at hand."""
        if self.device.type == "cuda":
            from paceline.models.gpu.eagle import gpu_eagle_forward

            return gpu_eagle_forward(self, states, tokens, positions, layout, cache, plan)
        c = self.config
        cos, sin = self.cos[positions], self.sin[positions]
        embedded = rms_norm(embedding_rows(self.embedding, tokens), self.input_norm, c.rms_eps)
        normed = rms_norm(states, self.hidden_norm, c.rms_eps)
        qkv = linear(torch.cat((embedded, normed), 1), self.qkv)  # [T, (H + 2 KV) hd]
        q = apply_rotary_and_store(qkv, cos, sin, *cache, layout.slots, c.num_heads, c.num_kv_heads)
        attended = linear(paged_attention(q, *cache, layout, c.head_dim**-0.5), self.output)
        residual = normed if c.norm_before_residual else states
        normed, hidden = add_rms_norm(attended, residual, self.post_attention_norm, c.rms_eps)
        return linear(silu_mul(linear(normed, self.gate_up)), self.down) + hidden

    def plan(self, rows: int, sequences: int) -> "AttentionPlan | None":
        """What passes of so many rows have in common on a GPU."""
        if self.device.type != "cuda":
            return None
        from paceline.models.gpu.eagle import plan_eagle

        return plan_eagle(self, rows, sequences)

    def logits(self, states: Tensor) -> Tensor:
        """[R, V'] float32 over the draft's vocabulary from outputs of `forward` [R, D]."""
        if self.device.type == "cuda":
            from paceline.models.gpu.eagle import gpu_eagle_norm

            return self.vocabulary.logits(gpu_eagle_norm(self, states))
        return self.vocabulary.logits(rms_norm(states, self.final_norm, self.config.rms_eps))

    def _matrix(self, shape: tuple[int, int], *names: str) -> LinearWeight:
        """One below the other, of `shape` together."""
        parts = [self._weights.matrix(f"{name}.weight") for name in names]
        if (sum(part.shape[0] for part in parts), *{part.shape[1] for part in parts}) != shape:
            found = ", ".join(
                f"{name} {part.shape[0]} x {part.shape[1]}" for name, part in zip(names, parts, strict=True)
            )
            raise UnsupportedModel(f"config.json makes {shape[0]} x {shape[1]} of what the weights have as {found}")
        return prepare_draft(concat(parts), self.device, self.dtype)

    def _vector(self, name: str) -> Tensor:
        return self._weights.vector(f"{name}.weight").to(self.device, self.dtype)
