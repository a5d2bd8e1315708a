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


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Divides low frequencies by `factor`, keeps high ones, interpolates between them by index; scales cosines and sines."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int
    magnitude: float
    """Factor of cosines and sines."""
    is_truncated: bool = True
    """Whether the interpolated range is rounded to whole indices."""

    def __call__(self, frequencies: Tensor) -> Tensor:
        step = -math.log(float(frequencies[1])) if len(frequencies) > 1 else 1.0  # frequency i is e^(-i step)
        low, high = (self._index(beta, step) for beta in (self.beta_fast, self.beta_slow))
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
        span = high - low or 0.001
        # 0: divided by `factor`; 1: kept
        keep = 1 - ((torch.arange(len(frequencies), dtype=frequencies.dtype) - low) / span).clamp(0, 1)
        return (1 - keep) * frequencies / self.factor + keep * frequencies

    def _index(self, turns: float, step: float) -> float:
        """Index of the frequency that turns so many times within the original context."""
        return math.log(self.original_max_position / (turns * 2 * math.pi)) / step


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors | YarnScaling


def rotary_table(head_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos, sin: [num_positions, head_dim / 2] float32."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is not None:
        frequencies = scaling(frequencies)
    magnitude = scaling.magnitude if isinstance(scaling, YarnScaling) else 1.0
    cos, sin = (torch.empty(num_positions, head_dim // 2) for _ in range(2))
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):
        stop = min(num_positions, start + _POSITIONS_AT_ONCE)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * frequencies
        cos[start:stop], sin[start:stop] = angles.cos() * magnitude, angles.sin() * magnitude
    return cos, sin


def rotary_table_bytes(head_dim: int, num_positions: int) -> int:
    """Bytes of the tables of cos and sin."""
    return 4 * head_dim * num_positions


def rope_from_hf(config: Mapping[str, Any], default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling). transformers 5 stores them in `rope_parameters`, transformers 4 in two keys."""
    fields = Metadata("config.json", config)
    rope = fields.section("rope_parameters" if fields.raw("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", 1.0, 1e12, fields.number("rope_theta", 1.0, 1e12, default_theta))
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
    if kind == "yarn":
        return theta, _yarn(rope, fields)
    raise UnsupportedModel(f"rope scaling {kind[:60]!r} is not supported; supported: linear, llama3, yarn")


def _yarn(rope: Metadata, fields: Metadata) -> YarnScaling:
    factor = _factor(rope, "factor")
    magnitude = _yarn_magnitude(factor)
    if "mscale" in rope and "mscale_all_dim" in rope:
        scales = rope.number("mscale", 0.0, 1e3), rope.number("mscale_all_dim", 0.0, 1e3)
        if all(scales):
            magnitude = _yarn_magnitude(factor, scales[0]) / _yarn_magnitude(factor, scales[1])
    longest = fields.count("max_position_embeddings", 1 << 24, 2048)
    return YarnScaling(
        factor,
        beta_fast=rope.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=rope.number("beta_slow", 1e-3, 1e6, 1.0),
        original_max_position=rope.count("original_max_position_embeddings", 1 << 24, longest),
        magnitude=rope.number("attention_factor", 1e-3, 1e3, magnitude),
        is_truncated=rope.flag("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


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
