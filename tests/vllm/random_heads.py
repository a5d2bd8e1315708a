"""Random targets, and random EAGLE-3 heads in the layout in which heads are published (`speculators`)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.families.read import read_config
from tests.fakes import RandomWeights
from tests.heads import draft_tensors, save_draft, vocabulary_map

VOCAB, DRAFT_VOCAB, LAYERS = 40, 24, 8
WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 32, 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
}
TARGETS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "llama-tied": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A head: what its checkpoint has, and what its config.json says."""

    target: str = "llama"
    norm_before_residual: bool | None = False
    """None: config.json does not say."""
    is_reduced: bool = True
    """Whether it has a vocabulary of its own, with `d2t` and `t2d`."""
    has_head: bool = True
    has_embedding: bool = False
    state_layers: tuple[int, ...] | None = (1, 4, 7)
    """None: config.json does not name them."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of config.json."""
    layer: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its transformer_layer_config."""
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of further tensors."""


def save_target(folder: Path, name: str) -> Path:
    """A random model, with a tokenizer of single characters."""
    folder.mkdir()
    values = SHAPE | TARGETS[name] | {"num_hidden_layers": LAYERS, "eos_token_id": VOCAB - 1}
    (folder / "config.json").write_text(json.dumps(values), "utf-8")
    config = read_config(values)
    weights = RandomWeights(config, seed=0)
    layers = [f"model.layers.{i}." for i in range(LAYERS)]
    parts = [*(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down"))]
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["self_attn.q_norm", "self_attn.k_norm"] if name == "qwen3" else []
    matrices = ["model.embed_tokens.weight", *(f"{layer}{part}.weight" for layer in layers for part in parts)]
    matrices += [] if config.tie_embeddings else ["lm_head.weight"]
    vectors = ["model.norm.weight", *(f"{layer}{norm}.weight" for layer in layers for norm in norms)]
    tensors = {one: weights.matrix(one).values for one in matrices} | {one: weights.vector(one) for one in vectors}
    save_file(
        {one: value.contiguous() for one, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({chr(ord("A") + i): i for i in range(VOCAB)}, []))
    backend.save(str(folder / "tokenizer.json"))
    return folder


def save_head(folder: Path, variant: Variant) -> Path:
    """A random head of `variant` in the layout of `speculators`."""
    save_draft(folder, head_config(variant), head_tensors(variant))
    return folder


def head_config(variant: Variant) -> dict[str, Any]:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": DRAFT_VOCAB if variant.is_reduced else VOCAB,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": TARGETS[variant.target]["architectures"]},
        },
        "transformer_layer_config": SHAPE | {"model_type": "llama", "num_hidden_layers": 1} | variant.layer,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **variant.fields,
    }
    if variant.norm_before_residual is not None:
        config["norm_before_residual"] = variant.norm_before_residual
    if variant.state_layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(variant.state_layers)
    return config


def head_tensors(variant: Variant) -> dict[str, Tensor]:
    shape = {
        "paceline_draft": "eagle",
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "ffn_size": FFN,
        "vocab_size": VOCAB,
        "capture": variant.state_layers or (0, 0, 0),
    }
    tensors = draft_tensors(shape)
    draw = torch.Generator().manual_seed(1)
    if variant.is_reduced:
        tensors |= vocabulary_map(DRAFT_VOCAB, VOCAB)
    if variant.has_head:
        rows = DRAFT_VOCAB if variant.is_reduced else VOCAB
        tensors["lm_head.weight"] = torch.randn(rows, WIDTH, generator=draw)
    if variant.has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, WIDTH, generator=draw)
    for name, size in variant.tensors.items():
        tensors[name] = torch.randn(size, generator=draw) * size[-1] ** -0.5 + (1.0 if "norm" in name else 0.0)
    return tensors
