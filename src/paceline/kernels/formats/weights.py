"""Weight matrices in the formats of checkpoints, before `linear.prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.quantized import GROUP, QuantizedWeight

GROUPS = (16, 32)
Activations = Literal["int8", "float32"]
"""Format to which the CPU kernels round activations before a product with quantised weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    values: Tensor  # [N, K] float32, float16 or bfloat16

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantize(self) -> Tensor:
        """[N, K] float32."""
        return self.values.float()


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """w = code * scale + offset, with one scale (and offset) per `group` inputs of an output."""

    codes: Tensor  # [N, K]; uint8: 4-bit codes 0..15, one per byte; int8: 8-bit codes
    scales: Tensor  # [N, K/group] float32
    offsets: Tensor | None  # [N, K/group] float32
    group: int
    activations: Activations = "int8"

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.group not in GROUPS or inputs % self.group:
            raise UnsupportedModel(
                f"{inputs} inputs in groups of {self.group} are not supported: groups must be 16 or 32 and divide the inputs; "
                "convert the checkpoint to Q8_0 or bfloat16"
            )
        for values in (self.scales, self.offsets):
            if values is not None and values.shape != (outputs, inputs // self.group):
                raise ValueError(
                    f"scales and offsets must be {(outputs, inputs // self.group)}, got {tuple(values.shape)}"
                )

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self) -> Tensor:
        """[N, K] float32, rounded after the product and after the addition."""
        grouped = self.codes.float().unflatten(1, (-1, self.group)) * self.scales.unsqueeze(2)
        if self.offsets is not None:
            grouped = grouped + self.offsets.unsqueeze(2)
        return grouped.flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class FourBit(Grouped):
    """A matrix of a checkpoint whose layers have 4 bits; GPUs keep the codes. Codes of int8 are twice the values of MXFP4."""

    stored_group: int = 32
    """Inputs per scale in the file. It is a multiple of `group`, and the scales of its groups are equal."""
    scale_dtype: torch.dtype = torch.bfloat16
    """Type of the scales in the file, 16 bits."""


Weight = Dense | Grouped | QuantizedWeight


def grouped(weight: QuantizedWeight) -> Grouped | None:
    """The same int8 matrix in the format of the native kernels; None if they do not support it (float8, or K not a multiple
    of the group)."""
    width, inputs = GROUPS[-1], weight.shape[1]
    if weight.values.dtype is not torch.int8 or inputs % width:
        return None
    return Grouped(weight.values, weight.scales_per_input(inputs // width, width).contiguous(), None, width)


def concat(weights: Sequence[Weight]) -> Weight:
    """One matrix with the outputs of all, in order. Quantised matrices stay quantised, with the smallest group among them.
    A mix of formats becomes dense float32."""
    if all(isinstance(weight, Dense) for weight in weights):
        values = [weight.values for weight in weights if isinstance(weight, Dense)]
        is_uniform = len({tensor.dtype for tensor in values}) == 1
        return Dense(torch.cat(values if is_uniform else [tensor.float() for tensor in values]))
    if all(isinstance(weight, Grouped) for weight in weights):
        return _concat_grouped([weight for weight in weights if isinstance(weight, Grouped)])
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    if len(quantized) == len(weights) and len({weight.values.dtype for weight in quantized}) == 1:
        groups = max(weight.scales.shape[1] for weight in quantized)
        scales = [weight.scales.expand(-1, groups) for weight in quantized]  # [N, 1] or [N, groups]
        codes = torch.cat(
            [weight.values.view(torch.uint8) for weight in quantized]
        )  # torch cannot concatenate float8 on every device
        return QuantizedWeight(codes.view(quantized[0].values.dtype), torch.cat(scales))
    return Dense(torch.cat([weight.dequantize() for weight in weights]))


def _concat_grouped(grouped: Sequence[Grouped]) -> Grouped:
    group = min(weight.group for weight in grouped)
    codes = torch.uint8 if all(weight.codes.dtype == torch.uint8 for weight in grouped) else torch.int8
    has_offsets = any(weight.offsets is not None for weight in grouped)
    finest = [_refine(weight, codes, group, has_offsets) for weight in grouped]
    offsets = [weight.offsets for weight in finest if weight.offsets is not None]
    joined = Grouped(
        torch.cat([weight.codes for weight in finest]),
        torch.cat([weight.scales for weight in finest]),
        torch.cat(offsets) if has_offsets else None,
        group,
        grouped[0].activations,
    )
    stored = [weight for weight in grouped if isinstance(weight, FourBit)]
    if len(stored) < len(grouped) or len({(weight.codes.dtype, weight.scale_dtype) for weight in stored}) > 1:
        return joined
    parts = joined.codes, joined.scales, joined.offsets, group, joined.activations
    return FourBit(*parts, gcd(*(weight.stored_group for weight in stored)), stored[0].scale_dtype)


def _refine(weight: Grouped, codes: torch.dtype, group: int, has_offsets: bool) -> Grouped:
    repeats = weight.group // group
    scales = weight.scales.repeat_interleave(repeats, 1)
    offsets = weight.offsets
    if offsets is not None:
        offsets = offsets.repeat_interleave(repeats, 1)
    elif has_offsets:
        offsets = torch.zeros_like(scales)
    return Grouped(weight.codes.to(codes), scales, offsets, group, weight.activations)


def take_rows(weight: Weight, order: Tensor) -> Weight:
    """The matrix of the outputs `order`, in this order."""
    if isinstance(weight, Dense):
        return Dense(weight.values[order])
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values.view(torch.uint8)[order].view(weight.values.dtype), weight.scales[order])
    offsets = None if weight.offsets is None else weight.offsets[order]
    return replace(weight, codes=weight.codes[order], scales=weight.scales[order], offsets=offsets)


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """The matrix of the outputs `start:stop`."""
    if isinstance(weight, Dense):
        return Dense(weight.values[start:stop].contiguous())
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[start:stop].contiguous(), weight.scales[start:stop].contiguous())
    offsets = None if weight.offsets is None else weight.offsets[start:stop]
    return replace(weight, codes=weight.codes[start:stop], scales=weight.scales[start:stop], offsets=offsets)


def columns(weight: Weight, start: int, stop: int) -> Weight:
    """The matrix of the inputs `start:stop`; dense float32 if the range splits a group of inputs with one scale."""
    width = weight.group if isinstance(weight, Grouped) else GROUP
    is_cut = bool(start % width) or (stop != weight.shape[1] and bool(stop % width))
    if isinstance(weight, Dense):
        return Dense(weight.values[:, start:stop].contiguous())
    if isinstance(weight, QuantizedWeight) and weight.scales.shape[1] == 1:
        return QuantizedWeight(weight.values[:, start:stop].contiguous(), weight.scales)
    if is_cut:
        return Dense(weight.dequantize()[:, start:stop].contiguous())
    groups = slice(start // width, -(-stop // width))
    scales = weight.scales[:, groups].contiguous()
    if isinstance(weight, QuantizedWeight):
        return QuantizedWeight(weight.values[:, start:stop].contiguous(), scales)
    offsets = None if weight.offsets is None else weight.offsets[:, groups]
    if isinstance(weight, FourBit):
        weight = replace(weight, stored_group=gcd(weight.stored_group, start, stop))
    return replace(weight, codes=weight.codes[:, start:stop], scales=scales, offsets=offsets)
