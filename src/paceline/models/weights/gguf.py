"""A GGUF file as a checkpoint, with Hugging Face names and row order.

A quantised row consists of blocks. Each is a struct of half-precision scales and packed codes, laid out as in ggml.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, Grouped, Weight
from paceline.model_files import GGUFReader, Metadata
from paceline.model_files.tokenizer import tokenizer_from_gguf
from paceline.models.families.read import read_gguf_config
from paceline.models.families.registry import family_of
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights.checkpoint import Checkpoint
from paceline.models.weights.family_weights import FusedWeights, with_rotary_rows
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
}
_AROUND_PARTS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Names of norms in families that have them before and after each part of a layer."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")
_UNUSED = (*_FACTORS, "rope_factors_long.weight")

# Names of ggml types by number, for error messages.
_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_GROWTH = 4 / 3
"""Loaded bytes per byte of a file, at most: half-precision scales become single precision."""
_LOW_HALVES = 0x0F0F0F0F0F0F0F0F


_USABLE = "Q4_K_M, Q5_K_M, Q6_K or Q8_0"
"""Names of quantisations in file names, of which all types are supported."""


def open_gguf(path: Path) -> Checkpoint:
    """Raises `UnsupportedModel`, which names the file, for whatever its header shows. Reads no weights."""
    try:
        return _open(path)
    except UnsupportedModel as error:
        if str(path) in str(error):
            raise
        raise UnsupportedModel(f"{path}: {error}") from None


def _open(path: Path) -> Checkpoint:
    reader = GGUFReader(path)
    if Metadata("the GGUF header", reader.metadata).count("split.count", 1 << 16, 1, least=0) > 1:
        raise UnsupportedModel(f"{path} is one part of a split GGUF: join the parts with `llama-gguf-split --merge`")
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
        reader.metadata, tensors["token_embd.weight"].shape[0], "output.weight" not in tensors, factors
    )
    stored = GGUFWeights(reader, config)
    weights = with_rotary_rows(FusedWeights(stored, config), config, family_of(config).has_adjacent_pairs)
    check_weights(config, weights.shape)
    return Checkpoint(path.stem, config, weights, lambda: tokenizer_from_gguf(reader.metadata), (path,), _GROWTH)


def _check_types(reader: GGUFReader) -> None:
    """Raise `UnsupportedModel` for the first tensor of a type that is not supported."""
    wrong = {name: info.type for name, info in reader.tensors.items() if _NAMES.get(info.type) not in _FORMS}
    if not wrong:
        return
    name, kind = next(iter(wrong.items()))
    others = sorted({_type_name(kind) for kind in wrong.values()})
    raise UnsupportedModel(
        f"the tensor {name} has the type {_type_name(kind)}; {len(wrong)} of {len(reader.tensors)} tensors have types that are "
        f"not supported ({', '.join(others)}): use a file of the same model with {_USABLE}"
    )


def _type_name(kind: int) -> str:
    return _NAMES.get(kind, f"number {kind}")


def check_tensor(reader: GGUFReader, name: str) -> None:
    """Raise `UnsupportedModel` unless the file contains the whole tensor, in a supported type."""
    info = reader.tensors[name]
    if info.shape[-1] % _form(info.type).block:
        raise UnsupportedModel(
            f"the tensor {name} has rows of {info.shape[-1]} values, which {_NAMES[info.type]} cannot store"
        )
    reader.bytes_at(info.offset, num_bytes(info.type, math.prod(info.shape)))


def _frequency_factors(reader: GGUFReader, name: str) -> tuple[float, ...]:
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

    def __init__(self, reader: GGUFReader, config: DecoderSpec) -> None:
        self._reader, self._config = reader, config
        self._places = {
            weight: place for name in reader.tensors if name not in _UNUSED for weight, place in self._weights_in(name)
        }

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
        raw = self._reader.bytes_at(info.offset + (place.expert or 0) * size, size)
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
        return _IN_LAYER | _AROUND_PARTS if self._config.norms == "pre_and_post" else _IN_LAYER

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


def _vector(reader: GGUFReader, name: str) -> Tensor:
    info = reader.tensors[name]
    raw = reader.bytes_at(info.offset, num_bytes(info.type, info.shape[0]))
    return unpack(info.type, torch.from_numpy(raw), (1, *info.shape)).dequantize()[0]


def num_bytes(kind: int, num_values: int) -> int:
    form = _form(kind)
    return num_values // form.block * form.block_bytes


def unpack(kind: int, raw: Tensor, shape: tuple[int, ...]) -> Weight:
    """Weight of `shape` from its stored bytes, `raw` [num_bytes] uint8. Exact: no value is rounded."""
    form = _form(kind)
    return form.unpack(raw.view(*shape[:-1], shape[-1] // form.block, form.block_bytes))


def _half(raw: Tensor) -> Tensor:
    """[..., 2 n] uint8 -> [..., n] float32"""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """[..., n] uint8 -> [..., 2, n]: low halves, then high halves; eight bytes at a time."""
    words = raw.contiguous().view(torch.int64)
    return torch.stack((words & _LOW_HALVES, (words >> 4) & _LOW_HALVES), dim=-2).view(torch.uint8)


def _grouped(codes: Tensor, scales: Tensor, offsets: Tensor | None, group: int) -> Grouped:
    """Blocks of a row joined: codes [N, blocks, ...] -> [N, K]."""
    return Grouped(codes.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), group)


def _dense(dtype: torch.dtype) -> Callable[[Tensor], Dense]:
    return lambda raw: Dense(raw.view(dtype).flatten(-2))


def _q4_0(raw: Tensor) -> Grouped:
    """d, 16 bytes of nibbles; w = (code - 8) d"""
    d = _half(raw[..., :2])
    return _grouped(_nibbles(raw[..., 2:]), d, -8.0 * d, 32)


def _q4_1(raw: Tensor) -> Grouped:
    """d, m, 16 bytes of nibbles; w = code d + m"""
    return _grouped(_nibbles(raw[..., 4:]), _half(raw[..., :2]), _half(raw[..., 2:4]), 32)


def _q8_0(raw: Tensor) -> Grouped:
    """d, 32 signed bytes; w = code d"""
    return _grouped(raw[..., 2:].contiguous().view(torch.int8), _half(raw[..., :2]), None, 32)


def _q5_0(raw: Tensor) -> Grouped:
    """d, 32 fifth bits, 16 bytes of nibbles; w = (code - 16) d"""
    return _grouped(_fifth_bits(raw[..., 2:6], raw[..., 6:]) - 16, _half(raw[..., :2]), None, 32)


def _q5_1(raw: Tensor) -> Grouped:
    """d, m, 32 fifth bits, 16 bytes of nibbles; w = code d + m"""
    return _grouped(_fifth_bits(raw[..., 4:8], raw[..., 8:]), _half(raw[..., :2]), _half(raw[..., 2:4]), 32)


def _fifth_bits(bits: Tensor, nibbles: Tensor) -> Tensor:
    """[..., 4] with one bit per code and [..., 16] with two codes per byte -> [..., 32] int8"""
    high = (bits[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [..., 4, 8]
    return (_nibbles(nibbles).flatten(-2) | (high.flatten(-2) << 4)).view(torch.int8)


def _q4_k(raw: Tensor) -> Grouped:
    """d, dmin, 12 bytes of scales, 4 x 32 bytes of nibbles; w = code d scale - dmin min"""
    codes = _nibbles(raw[..., 16:].unflatten(-1, (4, 32)))  # [N, blocks, 4, 2, 32]
    return _grouped(codes, *_k_scales(raw), 32)


def _q5_k(raw: Tensor) -> Grouped:
    """d, dmin, 12 bytes of scales, 32 bytes with a fifth bit for each of 8 groups, nibbles as above; w as above"""
    codes = _nibbles(raw[..., 48:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [N, blocks, 8, 32]
    high = (raw[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    return _grouped((codes | (high << 4)).view(torch.int8), *_k_scales(raw), 32)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets [N, blocks, 8] from d, dmin and 8 pairs of 6-bit (scale, min) in 12 bytes."""
    d, dmin = _half(raw[..., :2]), _half(raw[..., 2:4])
    low, high, mixed = raw[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)  # [N, blocks, 4] each
    scales = torch.cat((low & 63, (mixed & 15) | (low >> 6 << 4)), dim=-1)
    mins = torch.cat((high & 63, (mixed >> 4) | (high >> 6 << 4)), dim=-1)
    return d * scales.float(), -(dmin * mins.float())


def _q6_k(raw: Tensor) -> Grouped:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d; w = (code - 32) d scale"""
    low = _nibbles(raw[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [.., 2, 4, 32]
    pairs = raw[..., 128:192].unflatten(-1, (2, 32))
    high = torch.stack([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], dim=-2)  # [N, blocks, 2, 4, 32]
    codes = (low | (high << 4)).to(torch.int8) - 32
    scales = raw[..., 192:208].contiguous().view(torch.int8).float()
    return _grouped(codes, _half(raw[..., 208:]) * scales, None, 16)


@dataclass(frozen=True, slots=True)
class _Form:
    block: int
    block_bytes: int
    unpack: Callable[[Tensor], Weight]


_FORMS = {
    "F32": _Form(1, 4, _dense(torch.float32)),
    "F16": _Form(1, 2, _dense(torch.float16)),
    "BF16": _Form(1, 2, _dense(torch.bfloat16)),
    "Q4_0": _Form(32, 18, _q4_0),
    "Q4_1": _Form(32, 20, _q4_1),
    "Q5_0": _Form(32, 22, _q5_0),
    "Q5_1": _Form(32, 24, _q5_1),
    "Q8_0": _Form(32, 34, _q8_0),
    "Q4_K": _Form(256, 144, _q4_k),
    "Q5_K": _Form(256, 176, _q5_k),
    "Q6_K": _Form(256, 210, _q6_k),
}


def _form(kind: int) -> _Form:
    name = _type_name(kind)
    if name not in _FORMS:
        raise UnsupportedModel(f"GGUF tensor type {name} is not supported; supported: {', '.join(_FORMS)}")
    return _FORMS[name]
