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
    angles = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def rope_from_hf(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(theta, scaling). transformers 5 stores both in `rope_parameters`, transformers 4 in two keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(float(rope["factor"]))
    if kind == "llama3":
        return theta, Llama3Scaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported: linear, llama3")


def scaling_from_gguf(fields: Mapping[str, Any]) -> RopeScaling | None:
    """Scaling in GGUF fields, whose architecture prefix was removed."""
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(float(fields["rope.scaling.factor"]))
    raise UnsupportedModel(f"rope scaling {kind!r} in a GGUF is not supported; supported: linear")
