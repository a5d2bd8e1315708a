"""Weight matrices as checkpoints hold them: what loaders give to `linear.prepare`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel

GROUPS = (16, 32)


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
    """w = code * scale + offset, one scale (and offset) for every `group` inputs of an output."""

    codes: Tensor  # [N, K] uint8: 4-bit codes 0..15, one a byte; int8: 8-bit codes
    scales: Tensor  # [N, K/group] float32
    offsets: Tensor | None  # [N, K/group] float32
    group: int

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        if self.group not in GROUPS or inputs % self.group:
            raise UnsupportedModel(
                f"{inputs} inputs in groups of {self.group}: groups must be 16 or 32 and divide the inputs; "
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
        """[N, K] float32, rounded after the product and after the sum."""
        grouped = self.codes.float().unflatten(1, (-1, self.group)) * self.scales.unsqueeze(2)
        if self.offsets is not None:
            grouped = grouped + self.offsets.unsqueeze(2)
        return grouped.flatten(1)


Weight = Dense | Grouped


def concat(weights: Sequence[Weight]) -> Weight:
    """One matrix with the outputs of all, in order. Quantised matrices stay quantised, in the finest form among them; a
    mix of dense and quantised becomes dense float32."""
    grouped = [weight for weight in weights if isinstance(weight, Grouped)]
    dense = [weight for weight in weights if isinstance(weight, Dense)]
    if not grouped:
        dtypes = {weight.values.dtype for weight in dense}
        return Dense(torch.cat([weight.values if len(dtypes) == 1 else weight.dequantize() for weight in dense]))
    if dense:
        return Dense(torch.cat([weight.dequantize() for weight in weights]))
    group = min(weight.group for weight in grouped)
    codes = torch.uint8 if all(weight.codes.dtype == torch.uint8 for weight in grouped) else torch.int8
    has_offsets = any(weight.offsets is not None for weight in grouped)
    finest = [_refine(weight, codes, group, has_offsets) for weight in grouped]
    offsets = [weight.offsets for weight in finest if weight.offsets is not None]
    return Grouped(
        torch.cat([weight.codes for weight in finest]),
        torch.cat([weight.scales for weight in finest]),
        torch.cat(offsets) if has_offsets else None,
        group,
    )


def _refine(weight: Grouped, codes: torch.dtype, group: int, has_offsets: bool) -> Grouped:
    repeats = weight.group // group
    scales = weight.scales.repeat_interleave(repeats, 1)
    offsets = weight.offsets
    if offsets is not None:
        offsets = offsets.repeat_interleave(repeats, 1)
    elif has_offsets:
        offsets = torch.zeros_like(scales)
    return Grouped(weight.codes.to(codes), scales, offsets, group)
