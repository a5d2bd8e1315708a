"""Rotary embeddings: frequency scaling, and the table of cosines and sines.

Angles are float64 and the table float32: a float32 angle has an error of 1e-3 at position 10,000.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.models.metadata import Metadata

_POSITIONS_AT_ONCE = 1 << 16
"""Rows of the table that are computed at once: float64 angles take four times the memory of the result."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        # 0: divided by `factor`; 1: kept
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * frequencies / self.factor + keep * frequencies


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor per frequency, as in GGUF files."""

    factors: tuple[float, ...]

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / torch.tensor(self.factors, dtype=frequencies.dtype)


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors


def rotary_table(head_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos, sin: [num_positions, head_dim / 2] float32."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    cos, sin = (torch.empty(num_positions, head_dim // 2) for _ in range(2))
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):
        stop = min(num_positions, start + _POSITIONS_AT_ONCE)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * frequencies
        cos[start:stop], sin[start:stop] = angles.cos(), angles.sin()
    return cos, sin


def rotary_table_bytes(head_dim: int, num_positions: int) -> int:
    """Bytes of both tables."""
    return 4 * head_dim * num_positions


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). transformers 5 stores both in `rope_parameters`, transformers 4 in two keys."""
    fields = Metadata("config.json", config)
    rope = fields.section("rope_parameters" if fields.raw("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", 1.0, 1e12, fields.number("rope_theta", 1.0, 1e12, 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(_factor(rope, "factor"))
    if kind == "llama3":
        low, high = _factor(rope, "low_freq_factor"), _factor(rope, "high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"config.json has low_freq_factor={low} and high_freq_factor={high}: expected less")
        positions = rope.count("original_max_position_embeddings", 1 << 24)
        return theta, Llama3Scaling(_factor(rope, "factor"), low, high, positions)
    raise UnsupportedModel(f"rope scaling {kind[:60]!r} is not supported; supported: linear, llama3")


def scaling_from_gguf(fields: Metadata) -> RopeScaling | None:
    """Scaling in GGUF fields, whose architecture prefix was removed."""
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(_factor(fields, "rope.scaling.factor"))
    raise UnsupportedModel(f"rope scaling {kind[:60]!r} in a GGUF is not supported; supported: linear")


def _factor(fields: Metadata, name: str) -> float:
    return fields.number(name, 1e-3, 1e6)
