"""Weights of families that store them differently from Llama and Qwen3-MoE, under the names and in the form of those.

norms        the weights of norms are stored as w - 1 (gemma3_text)
experts      `experts.gate_up_proj` has all experts, gate and up in alternating columns, transposed or as MXFP4;
             the router is called `router` instead of `gate` (gpt_oss)

`unpack_mxfp4` reads MXFP4: 4-bit floats in groups of 32 with a power of two each, as in gpt-oss checkpoints. A code has a sign,
two exponent bits and a mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Twice the value is a whole number: 8-bit codes with a scale
of 2^(e - 1) are exact. They take twice the memory of the file on a CPU; a GPU packs them again.
"""

import re
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Dense, FourBit, Weight
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
    return weights if form.norms == "w" else _ShiftedNorms(weights)


class _ShiftedNorms:
    def __init__(self, stored: ShapedWeights) -> None:
        self._stored = stored

    def names(self) -> frozenset[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def matrix(self, name: str) -> Weight:
        return self._stored.matrix(name)

    def vector(self, name: str) -> Tensor:
        values = self._stored.vector(name)
        return values + 1.0 if name.endswith("norm.weight") else values


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
        fused, index, rows = f"{stem}.{'down' if part == 'down' else 'gate_up'}_proj", int(expert), _ROWS[part]
        if f"{fused}_blocks" in self._stored.names():
            blocks = self._stored.tensor(f"{fused}_blocks", index)[rows]
            return unpack_mxfp4(blocks, self._stored.tensor(f"{fused}_scales", index)[rows])
        return Dense(self._stored.tensor(fused, index).t()[rows].contiguous())

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
