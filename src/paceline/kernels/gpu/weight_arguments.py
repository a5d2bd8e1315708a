"""A weight as the arguments of a kernel."""

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.formats.four_bit import KINDS, FourBitWeight
from paceline.kernels.formats.linear import LinearWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class WeightArguments:
    codes: Tensor
    scales: Tensor | None = None
    """Scales, or the words of 4-bit weights."""
    groups: int = 0
    """Groups of inputs with a scale."""
    padded_outputs: int = 0
    has_scales: bool = False
    """Whether each output has one scale."""
    is_grouped: bool = False
    """Whether each output has one scale per 128 inputs of 8-bit weights."""
    four_bit: int = 0
    """Inputs per group of 4-bit weights; 0 for other weights."""
    kind: int = 0
    """Number of the kind of 4-bit weights."""


def weight_arguments(weight: LinearWeight) -> WeightArguments:
    assert not isinstance(weight, PackedWeight)  # packed weights are for CPUs
    if isinstance(weight, FourBitWeight):
        tiles, groups = weight.codes.shape[:2]
        kind = KINDS.index(weight.kind)
        return WeightArguments(weight.codes, weight.words, groups, tiles * 16, four_bit=weight.group, kind=kind)
    if isinstance(weight, QuantizedWeight):
        groups = weight.scales.shape[1]
        return WeightArguments(weight.values, weight.scales, groups, has_scales=groups == 1, is_grouped=groups > 1)
    return WeightArguments(weight.values)
