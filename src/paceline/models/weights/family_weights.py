"""Weights of families that store them differently from Llama and Qwen3-MoE, under the names and in the form of those.

names        parts of names differ (mixtral, glm4)
norms        the weights of norms are stored as w - 1 (gemma3_text)
fused        `qkv_proj` and `gate_up_proj` have the rows of several matrices (phi3, glm4)
experts      `experts.gate_up_proj` has all experts, gate and up in alternating columns, transposed or as MXFP4;
             the router is called `router` instead of `gate` (gpt_oss)
rotary rows  pairs of q and k are in adjacent rows (GGUF files of Llama, glm4, deepseek), or a part of a head turns (phi3, glm4,
             deepseek). The kernels rotate pairs that are half a head apart: the rows of q and k, and their biases and norms,
             are reordered

`unpack_mxfp4` reads MXFP4: 4-bit floats in groups of 32 with a power of two each, as in gpt-oss checkpoints. A code has a sign,
two exponent bits and a mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Twice the value is a whole number: 8-bit codes with a scale
of 2^(e - 1) are exact. They take twice the memory of the file on a CPU; a GPU packs them again.
"""

import re
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, FourBit, Weight, rows, take_rows
from paceline.models.families.layers import Latent
from paceline.models.families.registry import family_of
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights.checkpoint import Weights

GROUP = 32
_BIAS = 127
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> FourBit:
    """blocks [N, K/32, 16] uint8, the first of two codes in the low half; scales [N, K/32] uint8 -> [N, K]. The
    result is exact."""
    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape[:2] != scales.shape:
        raise UnsupportedModel(
            f"MXFP4 blocks of {blocks.dtype} {tuple(blocks.shape)} do not match scales of {scales.dtype} "
            f"{tuple(scales.shape)}: download the model again"
        )
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)  # [N, K]
    exponents = scales.to(torch.int32) - _BIAS - 1
    return FourBit(_DOUBLED[codes.long()], torch.ldexp(torch.ones(exponents.shape), exponents), None, GROUP)


class StoredWeights(Weights, Protocol):
    """Weights as a folder stores them."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or its part `index` along the first dimension."""
        ...


class ShapedWeights(Weights, Protocol):
    def shape(self, name: str) -> tuple[int, ...]: ...


def family_weights(config: DecoderSpec, stored: StoredWeights) -> ShapedWeights:
    """The weights of a folder under the names that a decoder reads."""
    form = family_of(config).stored
    weights: ShapedWeights = stored if form.experts == "separate" else _JoinedExperts(stored)
    if form.renamed:
        weights = _Renamed(weights, form.renamed)
    if form.is_fused:
        weights = FusedWeights(weights, config)
    if form.norms == "w - 1":
        weights = _ShiftedNorms(weights)
    return with_rotary_rows(weights, config, form.has_adjacent_pairs)


class _StoredUnchanged:
    """Weights as they are stored. A subclass changes some of them."""

    def __init__(self, stored: ShapedWeights) -> None:
        self._stored = stored

    def names(self) -> frozenset[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def matrix(self, name: str) -> Weight:
        return self._stored.matrix(name)

    def vector(self, name: str) -> Tensor:
        return self._stored.vector(name)


class _ShiftedNorms(_StoredUnchanged):
    def vector(self, name: str) -> Tensor:
        values = self._stored.vector(name)
        return values + 1.0 if name.endswith("norm.weight") else values


class _Renamed(_StoredUnchanged):
    def __init__(self, stored: ShapedWeights, renamed: tuple[tuple[str, str], ...]) -> None:
        super().__init__(stored)
        self._stored_parts = dict(renamed)
        self._parts = re.compile("|".join(re.escape(part) for part in self._stored_parts))

    def names(self) -> frozenset[str]:
        parts = {stored: part for part, stored in self._stored_parts.items()}
        pattern = re.compile("|".join(re.escape(part) for part in parts))
        return frozenset(pattern.sub(lambda part: parts[part[0]], name) for name in self._stored.names())

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self._stored_name(name))

    def matrix(self, name: str) -> Weight:
        return self._stored.matrix(self._stored_name(name))

    def vector(self, name: str) -> Tensor:
        return self._stored.vector(self._stored_name(name))

    def _stored_name(self, name: str) -> str:
        return self._parts.sub(lambda part: self._stored_parts[part[0]], name)


_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_PART = re.compile(r"(.*\.)(q|k|v|gate|up)(_proj\.)(weight|bias)")


class FusedWeights(_StoredUnchanged):
    """Reads q, k and v from the rows of `qkv_proj`, and gate and up from those of `gate_up_proj`, where these are stored."""

    def __init__(self, stored: ShapedWeights, config: DecoderSpec) -> None:
        super().__init__(stored)
        heads, width = config.heads, config.ffn_size
        self._sizes = {"qkv": (heads.q_size, heads.kv_size, heads.kv_size), "gate_up": (width, width)}
        self._fused_names = stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._rows(name)
        if found is None:
            return self._stored.shape(name)
        fused, start, stop = found
        stored = self._stored.shape(fused)
        expected = sum(self._sizes["qkv" if "qkv" in fused else "gate_up"])
        if stored[0] != expected:
            raise UnsupportedModel(f"{fused} has {stored[0]} rows: the configuration needs {expected}")
        return (stop - start, *stored[1:])

    def matrix(self, name: str) -> Weight:
        found = self._rows(name)
        return self._stored.matrix(name) if found is None else rows(self._stored.matrix(found[0]), *found[1:])

    def vector(self, name: str) -> Tensor:
        found = self._rows(name)
        return self._stored.vector(name) if found is None else self._stored.vector(found[0])[slice(*found[1:])]

    def _rows(self, name: str) -> tuple[str, int, int] | None:
        """The fused weight, and the rows of it that are the weight `name`. None if that is stored by itself."""
        found = _PART.fullmatch(name)
        if found is None:
            return None
        stem, part, middle, kind = found.groups()
        fused = _FUSED[part]
        if f"{stem}{fused}{middle}{kind}" not in self._fused_names:
            return None
        parts, sizes = fused.split("_") if "_" in fused else list(fused), self._sizes[fused]
        start = sum(sizes[: parts.index(part)])
        return f"{stem}{fused}{middle}{kind}", start, start + sizes[parts.index(part)]


def with_rotary_rows(weights: ShapedWeights, config: DecoderSpec, has_adjacent_pairs: bool) -> ShapedWeights:
    """The weights with rotary pairs half a head apart."""
    if config.heads.own is not None:  # the rows stay, the heads are filled
        return weights
    is_whole = all(rotary.num_rotated in (None, 0, rotary.size) for rotary in config.rotary)
    return weights if is_whole and not has_adjacent_pairs else _RotaryRows(weights, config, has_adjacent_pairs)


_ROTATED = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk]_(proj|norm)|q_b_proj|kv_a_proj_with_mqa)\.(weight|bias)")


class _RotaryRows(_StoredUnchanged):
    def __init__(self, stored: ShapedWeights, config: DecoderSpec, has_adjacent_pairs: bool) -> None:
        super().__init__(stored)
        self._config, self._has_adjacent_pairs = config, has_adjacent_pairs

    def matrix(self, name: str) -> Weight:
        weight = self._stored.matrix(name)
        return take_rows(weight, self._order(name, weight.shape[0])) if _ROTATED.fullmatch(name) else weight

    def vector(self, name: str) -> Tensor:
        values = self._stored.vector(name)
        return values[self._order(name, len(values))] if _ROTATED.fullmatch(name) else values

    def _order(self, name: str, num_rows: int) -> Tensor:
        """The stored row of each row, head by head: half of the rotated rows and of the others, then the other halves."""
        found = _ROTATED.fullmatch(name)
        assert found is not None
        latent = self._config.heads.latent
        if latent is not None:
            return _latent_order(self._config.head_dim, latent, num_rows, has_heads="kv_a" not in name)
        rotary = self._config.rotary[self._config.layers[int(found[1])].rotary]
        head = torch.arange(rotary.size)
        rotated, passed = head.tensor_split([rotary.size if rotary.num_rotated is None else rotary.num_rotated])
        halves = rotated.view(-1, 2).t() if self._has_adjacent_pairs else rotated.view(2, -1)
        order = torch.cat((halves, passed.view(2, -1)), 1).flatten()
        return (torch.arange(0, num_rows, rotary.size)[:, None] + order).flatten()


def _latent_order(head_dim: int, latent: Latent, num_rows: int, has_heads: bool) -> Tensor:
    """The stored row of each row of queries, or of compressed keys and values with the part of keys that turns."""
    turning = torch.arange(latent.num_rotated).view(-1, 2).t()
    if not has_heads:
        return torch.cat((torch.arange(latent.rank), latent.rank + turning.flatten()))
    first = head_dim - latent.num_rotated
    order = torch.cat((first + turning, torch.arange(first).view(2, -1)), 1).flatten()
    return (torch.arange(0, num_rows, head_dim)[:, None] + order).flatten()


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_ROWS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
"""Outputs of the stored matrix that belong to a part."""


class _JoinedExperts:
    def __init__(self, stored: StoredWeights) -> None:
        self._stored = stored

    def names(self) -> frozenset[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        found = _EXPERT.fullmatch(name)
        if found is None:
            return self._stored.shape(_router(name))
        stem, _, part, kind = found.groups()
        fused = f"{stem}.{'down' if part == 'down' else 'gate_up'}_proj"
        halves = 1 if part == "down" else 2
        if kind == "bias":
            return (self._stored.shape(f"{fused}_bias")[1] // halves,)
        if f"{fused}_blocks" in self._stored.names():
            _, outputs, groups, _ = self._dims(f"{fused}_blocks", 4)
            return outputs // halves, groups * GROUP
        _, inputs, outputs = self._dims(fused, 3)
        return outputs // halves, inputs

    def matrix(self, name: str) -> Weight:
        found = _EXPERT.fullmatch(name)
        if found is None:
            return self._stored.matrix(_router(name))
        stem, expert, part, _ = found.groups()
        fused, index, chosen = f"{stem}.{'down' if part == 'down' else 'gate_up'}_proj", int(expert), _ROWS[part]
        if f"{fused}_blocks" in self._stored.names():
            blocks = self._stored.tensor(f"{fused}_blocks", index)[chosen]
            return unpack_mxfp4(blocks, self._stored.tensor(f"{fused}_scales", index)[chosen])
        return Dense(self._stored.tensor(fused, index).t()[chosen].contiguous())

    def vector(self, name: str) -> Tensor:
        found = _EXPERT.fullmatch(name)
        if found is None:
            return self._stored.vector(_router(name))
        stem, expert, part, _ = found.groups()
        fused = f"{stem}.{'down' if part == 'down' else 'gate_up'}_proj_bias"
        return self._stored.tensor(fused, int(expert))[_ROWS[part]].float()

    def _dims(self, name: str, count: int) -> tuple[int, ...]:
        shape = self._stored.shape(name)
        if len(shape) != count:
            raise UnsupportedModel(f"{name} has the shape {shape}: expected {count} dimensions")
        return shape


def _router(name: str) -> str:
    return name.replace(".mlp.gate.", ".mlp.router.")
