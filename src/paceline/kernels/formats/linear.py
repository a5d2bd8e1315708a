"""A weight matrix on its device, in the format that the kernels of the device read."""

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import QuantizedWeight


@dataclass(frozen=True, slots=True, eq=False)
class DenseWeight:
    values: Tensor  # [N, K] on its device, in the model's dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


LinearWeight = DenseWeight | QuantizedWeight | FourBitWeight | PackedWeight
