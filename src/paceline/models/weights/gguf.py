"""A GGUF file as a checkpoint, with Hugging Face names and row order.

A quantised row consists of blocks. Each is a struct of half-precision scales and packed codes, laid out as in ggml.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Weight
from paceline.model_files import GGUFReader, Metadata
from paceline.model_files.hub import gguf_parts
from paceline.model_files.tokenizer import tokenizer_from_gguf
from paceline.models.families.read import read_gguf_config
from paceline.models.families.registry import family_of
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights.checkpoint import Checkpoint
from paceline.models.weights.family_weights import FusedWeights, with_rotary_rows
from paceline.models.weights.gguf_types import NAMES, TYPES, USABLE, block_type, num_bytes, type_name, unpack
from paceline.models.weights.shapes import check_weights

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
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_BEFORE_PARTS = {"post_attention_norm": "post_attention_layernorm"}
"""Another name of `ffn_norm` in families that have norms before each part of a layer only."""
_AROUND_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of norms in families that have them before and after each part of a layer."""
_AFTER_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of norms in families that have them after each part of a layer only."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")
_UNUSED = (*_FACTORS, "rope_factors_long.weight")

_GROWTH = 4 / 3
"""Loaded bytes per byte of a file, at most: half-precision scales become single precision."""


class _Parts:
    """The tensors of a GGUF file, or of all files of one that was split; the first one has the metadata."""

    def __init__(self, path: Path) -> None:
        self.paths = tuple(gguf_parts(path))
        readers = [GGUFReader(part) for part in self.paths]
        self.metadata = readers[0].metadata
        for number, reader in enumerate(readers):
            header = Metadata("the GGUF header", reader.metadata)
            found = header.count("split.no", 1 << 16, 0, least=0), header.count("split.count", 1 << 16, 1, least=0) or 1
            if found != (number, len(readers)):
                raise UnsupportedModel(
                    f"{self.paths[number]} says that it is part {found[0] + 1} of {found[1]}, and not {number + 1} of "
                    f"{len(readers)}: keep the names that the parts were published with"
                )
        self._readers = {name: reader for reader in readers for name in reader.tensors}
        self.tensors = {name: reader.tensors[name] for name, reader in self._readers.items()}
        count = Metadata("the GGUF header", self.metadata).count("split.tensors.count", 1 << 20, len(self.tensors))
        if count != len(self.tensors):
            raise UnsupportedModel(
                f"the parts of {path} have {len(self.tensors)} tensors and not {count}: download them again"
            )

    def bytes_of(self, name: str, start: int, count: int) -> np.ndarray:
        """[count] uint8 of a tensor, from its byte `start` on."""
        return self._readers[name].bytes_at(self.tensors[name].offset + start, count)


def open_gguf(path: Path) -> Checkpoint:
    """Raises `UnsupportedModel`, which names the file, for whatever its header shows. Reads no weights."""
    try:
        return _open(path)
    except UnsupportedModel as error:
        if str(path) in str(error):
            raise
        raise UnsupportedModel(f"{path}: {error}") from None


def _open(path: Path) -> Checkpoint:
    reader = _Parts(path)
    tensors, factors = reader.tensors, None
    if "token_embd.weight" not in tensors:
        raise UnsupportedModel(f"{path} has no token_embd.weight: it is not a language model")
    _check_types(reader)
    for name in tensors:
        check_tensor(reader, name)
    for name in _FACTORS:
        if name in tensors:
            factors = _frequency_factors(reader, name)
    config = read_gguf_config(
        reader.metadata, tensors["token_embd.weight"].shape[0], "output.weight" not in tensors, factors, tensors
    )
    stored = GGUFWeights(reader, config)
    weights = with_rotary_rows(FusedWeights(stored, config), config, family_of(config).has_adjacent_pairs)
    check_weights(config, weights.shape)
    return Checkpoint(path.stem, config, weights, lambda: tokenizer_from_gguf(reader.metadata), reader.paths, _GROWTH)


def _check_types(reader: _Parts) -> None:
    """Raise `UnsupportedModel` for the first tensor of a type that is not supported."""
    wrong = {name: info.type for name, info in reader.tensors.items() if NAMES.get(info.type) not in TYPES}
    if not wrong:
        return
    name, kind = next(iter(wrong.items()))
    others = sorted({type_name(kind) for kind in wrong.values()})
    raise UnsupportedModel(
        f"the tensor {name} has the type {type_name(kind)}; {len(wrong)} of {len(reader.tensors)} tensors have types that are "
        f"not supported ({', '.join(others)}): use a file of the same model with {USABLE}"
    )


def check_tensor(reader: _Parts, name: str) -> None:
    """Raise `UnsupportedModel` unless the file contains the whole tensor, in a supported type."""
    info = reader.tensors[name]
    if info.shape[-1] % block_type(info.type).block:
        raise UnsupportedModel(
            f"the tensor {name} has rows of {info.shape[-1]} values, which {NAMES[info.type]} cannot store"
        )
    reader.bytes_of(name, 0, num_bytes(info.type, math.prod(info.shape)))


def _frequency_factors(reader: _Parts, name: str) -> tuple[float, ...]:
    if len(reader.tensors[name].shape) != 1:
        raise UnsupportedModel(f"{name} is not a vector")
    factors = _vector(reader, name)
    if not bool((torch.isfinite(factors) & (factors > 0)).all()):
        raise UnsupportedModel(f"{name} must hold positive numbers")
    return tuple(factors.tolist())


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a weight is: a tensor, or one expert of a tensor with all experts of a layer."""

    tensor: str
    expert: int | None = None


class GGUFWeights:
    """`Weights` over an open GGUF file. Matrices that the file joins have the names `qkv_proj` and `gate_up_proj`."""

    def __init__(self, reader: _Parts, config: DecoderSpec) -> None:
        self._reader, self._config = reader, config
        self._places = {
            weight: place for name in reader.tensors if self._is_used(name) for weight, place in self._weights_in(name)
        }

    def _is_used(self, name: str) -> bool:
        """Whether the tensor is not of a layer of multi-token prediction, which follow the others."""
        layer = re.match(r"blk\.(\d+)\.", name)
        return name not in _UNUSED and (layer is None or int(layer[1]) < self._config.num_layers)

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._place(name)
        shape = self._reader.tensors[place.tensor].shape
        return shape if place.expert is None else shape[1:]

    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def matrix(self, name: str) -> Weight:
        place, shape = self._place(name), self.shape(name)
        info = self._reader.tensors[place.tensor]
        size = num_bytes(info.type, shape[0] * shape[1])
        raw = self._reader.bytes_of(place.tensor, (place.expert or 0) * size, size)
        return unpack(info.type, torch.from_numpy(raw), shape)

    def vector(self, name: str) -> Tensor:
        return _vector(self._reader, self._place(name).tensor)

    def _weights_in(self, name: str) -> Iterator[tuple[str, _Place]]:
        """The weights in a tensor of the file."""
        experts = _EXPERTS.fullmatch(name)
        if experts is None:
            yield self._hf_name(name), _Place(name)
            return
        shape, count = self._reader.tensors[name].shape, self._config.experts.num if self._config.experts else 0
        if len(shape) != 3 or shape[0] != count:
            raise UnsupportedModel(f"the tensor {name} has the shape {shape}: the header says {count} experts")
        layer, part = experts.groups()
        for number in range(count):
            yield f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight", _Place(name, number)

    def _hf_name(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        roles = self._roles()
        if match is not None and match[2] == "exp_probs_b":
            return f"model.layers.{match[1]}.mlp.gate.e_score_correction_bias"
        if match is None or match[2] not in roles:
            raise UnsupportedModel(
                f"the tensor {name[:80]} belongs to no supported architecture: the model has parts that are not implemented; "
                "use another model, or an export of it without them"
            )
        role = roles[match[2]]
        if role == "mlp.up_proj" and f"blk.{match[1]}.ffn_gate.weight" not in self._reader.tensors:
            role = "mlp.gate_up_proj"
        return f"model.layers.{match[1]}.{role}.{match[3]}"

    def _roles(self) -> dict[str, str]:
        norms = {"pre": _BEFORE_PARTS, "pre_and_post": _AROUND_PARTS, "post": _AFTER_PARTS}[self._config.norms]
        return norms | _IN_LAYER if norms is _BEFORE_PARTS else _IN_LAYER | norms

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            raise UnsupportedModel(
                f"the tensor {self._gguf_name(name)} ({name}) is missing, and the architecture in the header needs it: the "
                "file is incomplete or was converted wrongly; download it again"
            )
        return self._places[name]

    def _gguf_name(self, name: str) -> str:
        """The inverse of `_hf_name`, for messages."""
        top = {hf: stored for stored, hf in _TOP.items()}
        if name in top:
            return top[name]
        _, _, layer, *inner, kind = name.split(".")
        roles = {hf: stored for stored, hf in self._roles().items()}
        return f"blk.{layer}.{roles.get('.'.join(inner), '.'.join(inner))}.{kind}"


def _vector(reader: _Parts, name: str) -> Tensor:
    info = reader.tensors[name]
    raw = reader.bytes_of(name, 0, num_bytes(info.type, info.shape[0]))
    return unpack(info.type, torch.from_numpy(raw), (1, *info.shape)).dequantize()[0]
