"""Rotary embeddings: frequency scaling, and the table of cosines and sines.

Angles are float64 and the table float32: a float32 angle has an error of 1e-3 at position 10,000.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

_POSITIONS_AT_ONCE = 1 << 16
"""Rows of the table that are computed at once: float64 angles take four times the memory of the result."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides all frequencies by `factor`."""

    factor: float
    magnitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        return frequencies / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int
    magnitude: ClassVar[float] = 1.0

    def __call__(self, frequencies: Tensor) -> Tensor:
        turns = self.original_max_position * frequencies / (2 * math.pi)
        # 0: divided by `factor`; 1: kept
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * frequencies / self.factor + keep * frequencies


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor per frequency, as in GGUF files and in `longrope`."""

    factors: tuple[float, ...]
    magnitude: float = 1.0
    """Factor of cosines and sines."""

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
        """Index of the frequency that turns `turns` times within the original context."""
        return math.log(self.original_max_position / (turns * 2 * math.pi)) / step


RopeScaling = LinearScaling | Llama3Scaling | FrequencyFactors | YarnScaling


def rotary_table(
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    num_positions: int,
    num_rotated: int | None = None,
    exponent_width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """cos, sin: [num_positions, head_dim / 2] float32. With `num_rotated`, the pairs after the first `num_rotated / 2` do not
    turn: their cosine is 1 and their sine is 0, so that a rotation keeps their bits. `exponent_width` is as in `Rotary`."""
    width = head_dim if num_rotated is None else num_rotated
    cos, sin = torch.ones(num_positions, head_dim // 2), torch.zeros(num_positions, head_dim // 2)
    if width == 0:
        return cos, sin
    frequencies = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / (exponent_width or width))
    if scaling is not None:
        frequencies = scaling(frequencies)
    magnitude = 1.0 if scaling is None else scaling.magnitude
    turning = slice(width // 2)
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):
        stop = min(num_positions, start + _POSITIONS_AT_ONCE)
        angles = torch.arange(start, stop, dtype=torch.float64)[:, None] * frequencies
        cos[start:stop, turning], sin[start:stop, turning] = angles.cos() * magnitude, angles.sin() * magnitude
    return cos, sin


def query_factors(beta: float, period: int, num_positions: int) -> Tensor:
    """1 + beta * ln(1 + floor(p / period)) of each position p, [num_positions] float32."""
    return (1 + beta * (torch.arange(num_positions) // period).double().log1p()).float()


def rotary_table_bytes(head_dim: int, num_positions: int) -> int:
    """Bytes of the tables of cos and sin."""
    return 4 * head_dim * num_positions
