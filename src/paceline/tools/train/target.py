"""The frozen target as a torch module: whole rows for training, one token at a time for generation."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import rotary_table
from paceline.model_files.tokenizer import Tokenizer, fingerprint
from paceline.models.families.layers import DenseFeedForward, Heads, LayerSpec
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights import Checkpoint
from paceline.tools.train.layers import Layer, LayerShape, RMSNorm, Rotary, causal

CACHE_STEP = 128
"""The attended length of a decoding step is a multiple of this."""
TRAINABLE = ("llama", "mistral", "qwen2", "qwen3")
"""Examples of architectures of targets that drafts can be trained for."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Rows of text with the target's hidden states."""

    ids: Tensor  # [B, S] int64
    last: Tensor  # [B, S, D], after the final norm
    inner: Tensor | None  # [B, S, C * D], the captured layers concatenated


class Target(nn.Module):
    """Inference only. Rows start at position 0 and hold no padding."""

    embedding: Tensor  # [V, D]
    head: Tensor  # [V, D]

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        config = checkpoint.config
        if not can_train(config):
            raise UnsupportedModel(
                f"drafts cannot be trained for {config.architecture} targets; possible: {', '.join(TRAINABLE)}"
            )
        self.name, self.config, self.device, self.dtype = checkpoint.name, config, device, dtype
        shape = LayerShape.of(config)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)
        weights = checkpoint.weights
        state = {
            name: weights.matrix(f"model.{name}").dequantize()
            if len(value.shape) == 2
            else weights.vector(f"model.{name}")
            for name, value in self.state_dict().items()
        }
        self.load_state_dict(state)
        embedding = weights.matrix("model.embed_tokens.weight").dequantize()
        self.register_buffer("embedding", embedding, persistent=False)
        head = embedding if config.tie_embeddings else weights.matrix("lm_head.weight").dequantize()
        self.register_buffer("head", head, persistent=False)
        self.to(device, dtype).requires_grad_(False).eval()
        rotary = config.rotary[0]
        cos, sin = rotary_table(rotary.size, rotary.theta, rotary.scaling, config.max_position, rotary.num_rotated)
        self._compiled: list[Any] = []
        self._compiled_shape: tuple[int, int] | None = None
        self.rotary = Rotary(cos.repeat(1, 2).to(device), sin.repeat(1, 2).to(device))  # not rounded to `dtype`

    def compile_for(self, shape: tuple[int, int]) -> None:
        """Use compiled layers in `states` for ids of this shape; other shapes use the uncompiled layers."""
        self._compiled_shape = shape
        self._compiled = [torch.compile(layer) for layer in self.layers]

    def check_length(self, length: int) -> None:
        limit = min(self.config.max_position, self.config.sliding_window or self.config.max_position)
        if length > limit:
            raise UnsupportedModel(
                f"rows of {length} tokens exceed this target's context of {limit}; give --length {limit}"
            )

    @torch.no_grad()
    def states(self, ids: Tensor, state_layers: tuple[int, ...] = ()) -> States:
        """The hidden states of `ids` [B, S]. `state_layers` counts layers from 1, as `DecoderModel.forward`."""
        rotary = self.rotary.at(slice(ids.shape[1]))
        x = F.embedding(ids, self.embedding)
        inner = {0: x}
        layers = self._compiled if ids.shape == self._compiled_shape else self.layers
        for i, layer in enumerate(layers, 1):
            x = layer(x, rotary, causal)
            if i in state_layers:
                inner[i] = x
        captured = torch.cat([inner[i] for i in state_layers], -1) if state_layers else None
        return States(ids, self.norm(x), captured)

    @torch.no_grad()
    def step(self, tokens: Tensor, position: Tensor, cache: Tensor, width: int) -> Tensor:
        """[B] tokens, all at `position` [1], -> [B, V] float32 logits.

        `cache` is [layers, 2, B, KV, S, hd]; its slot `position` is written and slots below `width` are attended to.
        """
        rotary = self.rotary.at(position)
        attended = (torch.arange(width, device=self.device) <= position)[None, None, None]
        x = F.embedding(tokens, self.embedding)[:, None]
        for layer, (keys, values) in zip(self.layers, cache, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                keys.index_copy_(2, position, k.to(keys.dtype))
                values.index_copy_(2, position, v.to(values.dtype))
                # Queries of one group are rows of their key head, [B, KV, H / KV, hd], so keys are not expanded.
                grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
                found = F.scaled_dot_product_attention(
                    grouped, keys[:, :, :width], values[:, :, :width], attn_mask=attended
                )
                return found.reshape(q.shape)

            x = layer(x, rotary, attend)
        return F.linear(self.norm(x[:, 0]), self.head).float()

    def new_cache(self, rows: int, length: int) -> Tensor:
        slots = -(-length // CACHE_STEP) * CACHE_STEP
        c = self.config
        shape = (c.num_layers, 2, rows, c.num_kv_heads, slots, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def can_train(config: DecoderSpec) -> bool:
    """Whether `Layer` computes what the layers of a target compute, but for their window."""
    heads = config.heads
    plain = Heads(heads.num, heads.num_kv, heads.head_dim, has_bias=heads.has_bias, has_qk_norm=heads.has_qk_norm)
    layers = {LayerSpec(plain, DenseFeedForward(config.ffn_size), window=layer.window) for layer in config.layers}
    turns_whole_heads = [rotary.num_rotated for rotary in config.rotary] == [None]
    is_plain = config.embedding_scale == config.residual_scale == 1.0 and config.has_plain_logits
    return layers == set(config.layers) and is_plain and turns_whole_heads


def identity(name: str, tokenizer: Tokenizer) -> dict[str, str]:
    """The target's entry in a draft's config.json."""
    return {"name": name, "vocabulary": fingerprint(tokenizer).vocabulary}
