"""8-bit weights with float32 scales: half the bytes of bfloat16, and decoding is bound by the bytes it reads.

Only weights are quantised: products use the dequantised values, and activations keep their precision.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Quantization = Literal["int8", "fp8"]
GROUP = 128
"""Inputs per scale, if an output has several scales."""
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """w = values * scale, with one scale per output or one per 128 inputs of an output."""

    values: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [N, G] float32, G = 1 or ceil(K / 128)

    def __post_init__(self) -> None:
        outputs, inputs = self.values.shape
        if self.values.dtype not in LARGEST or self.scales.dtype is not torch.float32:
            raise ValueError(
                f"values {self.values.dtype} and scales {self.scales.dtype} must be int8 or fp8, and float32"
            )
        if self.scales.shape not in ((outputs, 1), (outputs, -(-inputs // GROUP))):
            raise ValueError(f"scales {tuple(self.scales.shape)} do not match values {tuple(self.values.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        return self.values.float() * self.scales_per_input(self.shape[1])

    def scales_per_input(self, count: int, width: int = 1) -> Tensor:
        """[N, count]: the scale of each group of `width` inputs; `width` divides 128."""
        if self.scales.shape[1] == 1:
            return self.scales.expand(-1, count)
        return self.scales.repeat_interleave(GROUP // width, 1)[:, :count]


def quantize(values: Tensor, kind: Quantization) -> QuantizedWeight:
    """values [N, K] rounded to the nearest, with one scale per output: its largest magnitude maps to the largest number."""
    dtype = _DTYPES[kind]
    largest = LARGEST[dtype]
    scales = values.abs().amax(1, keepdim=True).float() / largest
    scales = torch.where(scales > 0, scales, 1.0)  # all zeros: any scale is right
    scaled = (values / scales).clamp_(-largest, largest)  # float32
    return QuantizedWeight(scaled.round_().to(dtype) if dtype is torch.int8 else scaled.to(dtype), scales)


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the dtype of a cache. float8_e4m3fn has no infinities: too large values saturate instead of becoming NaN."""
    if dtype is torch.float8_e4m3fn:
        values = values.clamp(-LARGEST[dtype], LARGEST[dtype])
    return values.to(dtype)


def take(table: Tensor, rows: Tensor) -> Tensor:
    """table[rows]. Also supports float8, which torch cannot index on every device."""
    if table.dtype is torch.float8_e4m3fn:
        return table.view(torch.uint8)[rows].view(table.dtype)
    return table[rows]


def put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """table[rows] = values of the same dtype. Also supports float8."""
    if table.dtype is torch.float8_e4m3fn:
        table, values = table.view(torch.uint8), values.view(torch.uint8)
    table[rows] = values
