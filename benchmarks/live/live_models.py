"""Models of `live.py`: a target of random weights, a draft that matches it, one that does not, and one that does not fit.

The first two layers of the target decide most of its text, so that they alone are a good draft. The poor draft has two layers
of other random weights.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB = 128, 384, 4, 32, 256
DRAFT_LAYERS = 2
REST = 0.02
"""Scale of what the other layers of the target add to its text."""


@dataclass(frozen=True)
class Models:
    target: str
    good: str
    poor: str
    other: str
    """A draft with another vocabulary."""


def write_models(folder: Path, layers: int) -> Models:
    """Checkpoints with a tokenizer of bytes: one for all but `other`."""
    tensors = _weights(layers, seed=0)
    first = {name: values for name, values in tensors.items() if _layer(name) < DRAFT_LAYERS}
    poor = _weights(DRAFT_LAYERS, seed=1)
    checkpoints = {"target": tensors, "good": first, "poor": poor}
    paths = [_save(folder / name, values) for name, values in checkpoints.items()]
    return Models(*paths, other=_save(folder / "other", poor, is_reversed=True))


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _weights(layers: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    wide = HEADS * HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": matrix(VOCAB, HIDDEN, 3.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for i in range(layers):
        name, scale = f"model.layers.{i}", 1.0 if i < DRAFT_LAYERS else REST
        for part in "qkv":
            tensors[f"{name}.self_attn.{part}_proj.weight"] = matrix(wide, HIDDEN)
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, wide, scale)
        tensors[f"{name}.mlp.gate_proj.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{name}.mlp.up_proj.weight"] = matrix(FFN, HIDDEN)
        tensors[f"{name}.mlp.down_proj.weight"] = matrix(HIDDEN, FFN, scale)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{norm}.weight"] = torch.ones(HIDDEN)
    return tensors


def _save(folder: Path, tensors: dict[str, Tensor], is_reversed: bool = False) -> str:
    """`is_reversed`: the same bytes have other ids."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1 + max(_layer(name) for name in tensors),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=is_reversed))}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)
