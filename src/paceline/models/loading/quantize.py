"""A checkpoint's layers in 8 bits, made as they are loaded."""

import torch
from torch import Tensor

from paceline.kernels.quantized import Quantization, quantize
from paceline.kernels.weights import Dense, Grouped, Weight
from paceline.models.loading.checkpoint import Weights


class QuantizedWeights:
    """`Weights` whose layer matrices are quantised on `device`, one scale an output. Embedding and head stay as they are:
    the one is a lookup, and rounding the other shows in every logit.

    What is quantised already stays so, unless it would be unpacked on the device: 4-bit codes are kept on a CPU alone.
    """

    def __init__(self, weights: Weights, kind: Quantization, device: torch.device) -> None:
        self._weights, self._kind, self._device = weights, kind, device

    def names(self) -> frozenset[str]:
        return self._weights.names()

    def vector(self, name: str) -> Tensor:
        return self._weights.vector(name)

    def matrix(self, name: str) -> Weight:
        weight = self._weights.matrix(name)
        if not name.startswith("model.layers.") or not self._is_unpacked(weight):
            return weight
        values = weight.values.to(self._device) if isinstance(weight, Dense) else weight.dequantize().to(self._device)
        return quantize(values, self._kind)

    def _is_unpacked(self, weight: Weight) -> bool:
        return isinstance(weight, Dense) or (isinstance(weight, Grouped) and self._device.type != "cpu")
