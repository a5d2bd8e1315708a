"""A GGUF file as a checkpoint: its names and row order turned into the Hugging Face ones."""

import re
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import Dense, Grouped, Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.gguf_blocks import num_bytes, unpack
from paceline.models.loading.gguf_reader import GGUFReader
from paceline.models.tokenizer.gguf_tokenizer import tokenizer_from_gguf

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> Checkpoint:
    reader = GGUFReader(path)
    if reader.metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(f"{path} is one part of a split GGUF; join the parts with `llama-gguf-split --merge`")
    tensors, factors = reader.tensors, None
    if "token_embd.weight" not in tensors:
        raise UnsupportedModel(f"{path} has no token_embd.weight: it is not a language model")
    if "rope_freqs.weight" in tensors:
        factors = tuple(_vector(reader, "rope_freqs.weight").tolist())
    config = ModelConfig.from_gguf(
        reader.metadata, tensors["token_embd.weight"].shape[0], "output.weight" not in tensors, factors
    )
    return Checkpoint(path.stem, config, GGUFWeights(reader, config), lambda: tokenizer_from_gguf(reader.metadata))


class GGUFWeights:
    """`Weights` over an open GGUF file."""

    def __init__(self, reader: GGUFReader, config: ModelConfig) -> None:
        self._reader, self._config = reader, config
        self._stored = {_hf_name(name): name for name in reader.tensors if name != "rope_freqs.weight"}

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def matrix(self, name: str) -> Weight:
        info = self._reader.tensors[self._name(name)]
        raw = self._reader.bytes_at(info.offset, num_bytes(info.type, info.shape[0] * info.shape[1]))
        weight = unpack(info.type, torch.from_numpy(raw), info.shape)
        # NOTE: llama files hold the rotary pairs of q and k side by side; Qwen files, as we do, half a head apart.
        if self._config.architecture in ("llama", "mistral") and name.endswith(("q_proj.weight", "k_proj.weight")):
            return _take_rows(weight, _half_split_rows(info.shape[0], self._config.head_dim))
        return weight

    def vector(self, name: str) -> Tensor:
        return _vector(self._reader, self._name(name))

    def _name(self, name: str) -> str:
        if name not in self._stored:
            raise UnsupportedModel(f"the GGUF file has no tensor for {name}")
        return self._stored[name]


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModel(f"the GGUF file has a tensor {name}, which no supported architecture uses")
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _vector(reader: GGUFReader, name: str) -> Tensor:
    info = reader.tensors[name]
    raw = reader.bytes_at(info.offset, num_bytes(info.type, info.shape[0]))
    return unpack(info.type, torch.from_numpy(raw), (1, *info.shape)).dequantize()[0]


def _half_split_rows(num_rows: int, head_dim: int) -> Tensor:
    """For each row in half-split order, where it lies in pair order: head h, half c, pair j <- (h, j, c)."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _take_rows(weight: Weight, rows: Tensor) -> Weight:
    if isinstance(weight, Dense):
        return Dense(weight.values[rows])
    assert isinstance(weight, Grouped)
    offsets = None if weight.offsets is None else weight.offsets[rows]
    return Grouped(weight.codes[rows], weight.scales[rows], offsets, weight.group)
