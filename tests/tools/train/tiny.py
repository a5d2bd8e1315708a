"""A tiny chat model on disk: byte tokens, special tokens, and random weights with clear arg-maxes."""

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from paceline.model_files.tokenizer.tokenizer import Tokenizer
from paceline.models.loading.load import open_checkpoint
from paceline.models.weights.checkpoint import Checkpoint
from paceline.tools.progress.progress import StopRequest
from paceline.tools.train.target import States, Target

START, END = 256, 257
VOCAB = 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role[:1] }}{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": END,
}


def save_tiny(folder: Path, template: str | None = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(0)
    d, q, kv, ffn = 32, 32, 16, 48
    weights = {"model.embed_tokens.weight": torch.randn(VOCAB, d, generator=draw)}
    shapes = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d)}
    shapes |= {
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (ffn, d),
        "mlp.up_proj": (ffn, d),
        "mlp.down_proj": (d, ffn),
    }
    for layer in range(int(str(CONFIG["num_hidden_layers"]))):
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=draw) * 1.5 * shape[1] ** -0.5
            weights[f"model.layers.{layer}.{name}.weight"] = values
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 0.5 + torch.rand(d, generator=draw)
    weights["model.norm.weight"] = 0.5 + torch.rand(d, generator=draw)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def open_tiny(folder: Path) -> tuple[Target, Tokenizer, Checkpoint]:
    checkpoint = open_checkpoint(save_tiny(folder))
    return Target(checkpoint, torch.device("cpu"), torch.float32), checkpoint.read_tokenizer(), checkpoint


def some_ids(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def some_states(target: Target, state_layers: tuple[int, ...], rows: int = 2, length: int = 24) -> States:
    return target.states(some_ids(rows, length), state_layers)


class StopWhen(StopRequest):
    """Stops when `condition` returns true."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def __call__(self) -> bool:
        return self._condition()
