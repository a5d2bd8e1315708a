"""Differentiable decoder layers, and the vocabulary of a draft.

Parameters have the Hugging Face names, so a state dict is a checkpoint. The residual stream keeps its dtype, float32 for a
draft in training, whatever dtype autocast uses for matrix products.

`DraftVocabulary` has the token ids that a draft can predict. Fewer ids make its head, most of a small draft's cost, cheaper.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.families.layers import Heads
from paceline.models.families.spec import DecoderSpec

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, H, S, hd], k and v [B, KV, S, hd] -> [B, H, S, hd]"""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a trained layer computes: attention of `heads`, and a dense feed-forward layer of silu(gate) * up."""

    hidden_size: int
    heads: Heads
    ffn_size: int
    rms_eps: float

    @classmethod
    def of(cls, config: DecoderSpec) -> "LayerShape":
        return cls(config.hidden_size, config.heads, config.ffn_size, config.rms_eps)


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    cos: Tensor  # [S, hd], with two equal halves
    sin: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[..., S, hd] rotated by half-split pairs."""
        left, right = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat([-right, left], -1) * self.sin.to(x.dtype)

    def at(self, rows: slice | Tensor) -> "Rotary":
        return Rotary(self.cos[rows], self.sin[rows])


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        heads = shape.heads
        self.head_dim = heads.head_dim
        self.q_proj = nn.Linear(input_size, heads.q_size, heads.has_bias)
        self.k_proj = nn.Linear(input_size, heads.kv_size, heads.has_bias)
        self.v_proj = nn.Linear(input_size, heads.kv_size, heads.has_bias)
        self.o_proj = nn.Linear(heads.q_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(heads.head_dim, shape.rms_eps) if heads.has_qk_norm else None
        self.k_norm = RMSNorm(heads.head_dim, shape.rms_eps) if heads.has_qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """[B, S, input_size] -> [B, S, D]"""
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = attend(rotary(q), rotary(k), v)  # [B, H, S, hd]
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    @torch.no_grad()
    def widen(self, size: int) -> None:
        """Add rows with small random inputs and zero outputs."""
        more, inputs = size - self.gate_proj.out_features, self.gate_proj.in_features
        for part in (self.gate_proj, self.up_proj):
            rows = torch.randn(more, inputs) * 0.7 * inputs**-0.5
            part.weight, part.out_features = nn.Parameter(torch.cat([part.weight, rows])), size
        columns = torch.zeros(self.down_proj.out_features, more)
        self.down_proj.weight = nn.Parameter(torch.cat([self.down_proj.weight, columns], 1))
        self.down_proj.in_features = size


class Layer(nn.Module):
    """A plain decoder layer."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rotary: Rotary, attend: Attend = causal) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class FusionLayer(nn.Module):
    """EAGLE's layer. Attention reads the next token's embedding and the feature. The residual is the feature."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = FeedForward(shape)

    def forward(self, feature: Tensor, embedding: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        both = torch.cat([self.input_layernorm(embedding), self.hidden_norm(feature)], -1)  # [B, S, 2D]
        x = feature + self.self_attn(both, rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def initialize(layers: nn.ModuleList, hidden_size: int) -> None:
    """Draw small normal weights. Weights that write to the residual are scaled down by their number.

    Training from copies of the target's layers diverges: the target has outlier activations.
    """
    deviation = 0.7 * hidden_size**-0.5
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, 0.0, deviation / ((2 * len(layers)) ** 0.5 if writes else 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """The target ids of a draft's tokens. `ids` [Vd] int64 ascending has the target id of each draft id. If it is None, the
    draft has the whole vocabulary."""

    size: int
    """Size of the target's vocabulary, V."""
    ids: Tensor | None = None

    def head(self, target_head: Tensor) -> Tensor:
        """[Vd, D]: the rows of the target's head for these ids."""
        return target_head if self.ids is None else target_head[self.ids.to(target_head.device)]

    def contains(self, tokens: Tensor) -> Tensor:
        """Whether the vocabulary has each token, as bool of the shape of `tokens`."""
        if self.ids is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        return self._inside(tokens.device)[tokens]

    def to_draft(self, tokens: Tensor) -> Tensor:
        """The draft ids of `tokens`. 0 for tokens that the vocabulary does not contain."""
        if self.ids is None:
            return tokens
        inside = self._inside(tokens.device)
        return ((inside.cumsum(0) - 1) * inside)[tokens]

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the saved folder: `d2t`, the offset from draft id to target id, and `t2d`, the mask of ids."""
        if self.ids is None:
            return {}
        return {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": self._inside(self.ids.device)}

    @classmethod
    def from_tensors(cls, size: int, tensors: dict[str, Tensor]) -> "DraftVocabulary":
        offsets = tensors.get("d2t")
        return cls(size, None if offsets is None else offsets + torch.arange(len(offsets)))

    def _inside(self, device: torch.device) -> Tensor:
        assert self.ids is not None
        inside = torch.zeros(self.size, dtype=torch.bool, device=device)
        inside[self.ids.to(device)] = True
        return inside


def most_frequent(text: Tensor, size: int, count: int | None) -> DraftVocabulary:
    """The `count` most frequent ids of `text`. Ties go to the lower id."""
    if count is None or count >= size:
        return DraftVocabulary(size)
    frequency = torch.bincount(text.flatten().cpu().long(), minlength=size)
    chosen = torch.sort(frequency, descending=True, stable=True).indices[:count]
    return DraftVocabulary(size, chosen.sort().values)
