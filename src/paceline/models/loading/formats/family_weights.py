"""Weights of families that store them differently from Llama and Qwen3-MoE, under the names and in the form of those.

gemma3_text  norm weights are stored as w - 1
gpt_oss      `experts.gate_up_proj` has all experts, gate and up in alternating columns, transposed or as MXFP4;
             the router is called `router` instead of `gate`
"""

import re
from typing import Protocol

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.weights import Dense, Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.checkpoint import Weights
from paceline.models.loading.formats.mxfp4 import GROUP, unpack_mxfp4


class StoredWeights(Weights, Protocol):
    """Weights as a folder stores them."""

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """A tensor, or its part `index` along the first dimension."""
        ...


class ShapedWeights(Weights, Protocol):
    def shape(self, name: str) -> tuple[int, ...]: ...


def family_weights(config: ModelConfig, stored: StoredWeights) -> ShapedWeights:
    """The weights of a folder under the names that a decoder reads."""
    if config.architecture == "gemma3_text":
        return _GemmaWeights(stored)
    if config.architecture == "gpt_oss":
        return _GptOssWeights(stored)
    return stored


class _GemmaWeights:
    def __init__(self, stored: StoredWeights) -> None:
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


class _GptOssWeights:
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
