"""Reference implementations of the drafts in plain torch: one sequence at a time, without a cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.kernels.linear import embedding_rows
from paceline.models.decoder.forward import DecoderModel
from paceline.models.runner.runner import ModelRunner, Span


def table(weight: Any) -> Tensor:
    """[N, K]: values of a matrix of the target."""
    return embedding_rows(weight, torch.arange(weight.shape[0]))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, H, hd]"""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), -1)


def attend(x: Tensor, w: Mapping[str, Tensor], prefix: str, config: Mapping[str, Any], positions: Tensor) -> Tensor:
    heads, kv, width = config["num_heads"], config["num_kv_heads"], config["head_dim"]
    q, k, v = (x @ w[f"{prefix}.{part}_proj.weight"].T for part in "qkv")
    q, k, v = q.unflatten(1, (heads, width)), k.unflatten(1, (kv, width)), v.unflatten(1, (kv, width))
    q, k = rotate(q, positions, config["rope_theta"]), rotate(k, positions, config["rope_theta"])
    k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / width**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1) @ w[f"{prefix}.o_proj.weight"].T


def feed_forward(x: Tensor, w: Mapping[str, Tensor], prefix: str) -> Tensor:
    hidden = silu(x @ w[f"{prefix}.gate_proj.weight"].T) * (x @ w[f"{prefix}.up_proj.weight"].T)
    return hidden @ w[f"{prefix}.down_proj.weight"].T


def target_states(target: DecoderModel, ids: Sequence[int], layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
    """(inner states, last states) of all tokens in one pass."""
    runner = ModelRunner(target, -(-len(ids) // 16))
    out = runner.forward([Span(range(runner.num_blocks), 0, ids, 0)], tuple(layers), last_hidden=True)
    assert out.last_hidden is not None
    return dict(out.hidden_by_layer), out.last_hidden


def eagle_logits(
    w: Mapping[str, Tensor],
    config: Mapping[str, Any],
    target: DecoderModel,
    features: Tensor,  # [n, 3D] of the committed slots
    positions: Sequence[int],  # of these slots
    ids: Sequence[int],
    path: Sequence[int] = (),
    norm_before_residual: bool = False,
) -> Tensor:
    """[V']: logits after `path`. All slots are computed again for every token of the path."""
    eps, head, embedding = config["rms_eps"], table(target.head), table(target.embedding)
    states = features @ w["fc.weight"].T
    slot_positions, tokens = list(positions), [ids[p + 1] for p in positions]
    out = states
    for step in range(len(path) + 1):
        if step:
            states = torch.cat((states, out[-1:]))
            slot_positions.append(slot_positions[-1] + 1)
            tokens.append(path[step - 1])
        embedded = norm(embedding[tokens], w["layers.0.input_layernorm.weight"], eps)
        normed = norm(states, w["layers.0.hidden_norm.weight"], eps)
        x = torch.cat((embedded, normed), 1)
        residual = normed if norm_before_residual else states
        hidden = residual + attend(x, w, "layers.0.self_attn", config, torch.tensor(slot_positions))
        middle = norm(hidden, w["layers.0.post_attention_layernorm.weight"], eps)
        out = hidden + feed_forward(middle, w, "layers.0.mlp")
    return norm(out[-1], w["norm.weight"], eps) @ reduced(w, head).T


def reduced(w: Mapping[str, Tensor], head: Tensor) -> Tensor:
    """Rows of the target's head in the draft's vocabulary."""
    if "d2t" not in w:
        return head
    return head[torch.arange(len(w["d2t"])) + w["d2t"]]


def medusa_logits(w: Mapping[str, Tensor], target: DecoderModel, last: Tensor, k: int) -> Tensor:
    state = last + silu(last @ w[f"heads.{k}.weight"].T + w[f"heads.{k}.bias"])
    return state @ reduced(w, table(target.head)).T


def distilled_logits(
    w: Mapping[str, Tensor], config: Mapping[str, Any], target: DecoderModel, ids: Sequence[int]
) -> Tensor:
    """[T, V']"""
    eps = config["rms_eps"]
    x = norm(table(target.embedding)[list(ids)], w["embed_norm.weight"], eps)
    for i in range(config["num_layers"]):
        prefix = f"layers.{i}"
        normed = norm(x, w[f"{prefix}.input_layernorm.weight"], eps)
        x = x + attend(normed, w, f"{prefix}.self_attn", config, torch.arange(len(x)))
        normed = norm(x, w[f"{prefix}.post_attention_layernorm.weight"], eps)
        x = x + feed_forward(normed, w, f"{prefix}.mlp")
    return norm(x, w["norm.weight"], eps) @ reduced(w, table(target.head)).T
