"""Checks the shapes of weights against a configuration; weights without values, on the device `meta`.

The choice of kernels depends on types and shapes only.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.layout import META
from paceline.kernels.formats.quantized import Quantization, QuantizedWeight
from paceline.kernels.formats.weights import Activations, Dense, FourBit, Weight
from paceline.models.families.prequantized import SCALES
from paceline.models.families.spec import DecoderSpec
from paceline.models.weights.checkpoint import Checkpoint, Float32Activations, QuantizedWeights, Weights


class WeightShapes:
    """`Weights` of a checkpoint whose values are not read. Its 8-bit and 4-bit matrices stay what they are. Of 4-bit matrices
    the first with each role is read: all layers have the format of the first."""

    def __init__(self, weights: Weights, config: DecoderSpec, has_four_bit: bool) -> None:
        self._weights, self._config, self._has_four_bit = weights, config, has_four_bit
        self._names = weights.names()
        self._first: dict[str, FourBit | None] = {}

    def names(self) -> frozenset[str]:
        return self._names

    def matrix(self, name: str) -> Weight:
        stem = name.removesuffix("weight")
        if any(stem + scale in self._names for scale in SCALES):
            stored = self._weights.matrix(name)  # a mapped file: no values are read
            assert isinstance(stored, QuantizedWeight)
            return QuantizedWeight(stored.values.to(META), stored.scales.to(META))
        outputs, inputs = self._config.weight_shape(name)
        first = self._first_like(name)
        if first is not None:
            codes = torch.empty(outputs, inputs, dtype=first.codes.dtype, device=META)
            scales = torch.empty(outputs, inputs // first.group, device=META)
            return replace(first, codes=codes, scales=scales, offsets=None if first.offsets is None else scales)
        return Dense(torch.empty(outputs, inputs, dtype=torch.bfloat16, device=META))

    def _first_like(self, name: str) -> FourBit | None:
        """The first matrix with the role of `name` in its layer; None if it does not have 4 bits."""
        role = name.split(".")[-2]
        if role not in self._first:
            is_candidate = self._has_four_bit and name.startswith("model.layers.")
            stored = self._weights.matrix(name) if is_candidate else None
            self._first[role] = stored if isinstance(stored, FourBit) else None
        return self._first[role]

    def vector(self, name: str) -> Tensor:
        return torch.empty(self._config.weight_shape(name), device=META)


def check_weights(config: DecoderSpec, shape: Callable[[str], tuple[int, ...]], has_tables: bool = True) -> None:
    """Raise `UnsupportedModel` for the first weight that is missing or has another shape than `config` requires.

    `shape` returns the shape of a stored weight. Without `has_tables` the checkpoint has neither embedding nor head.
    """
    for name, expected in config.required_weights(has_tables):
        found = shape(name)
        if expected != found:
            raise UnsupportedModel(
                f"{name} has the shape {found}, and the configuration requires {expected}: the files do not belong together; "
                "download the model again"
            )


def checkpoint_weights(
    checkpoint: Checkpoint, device: torch.device, quantization: Quantization | None, activations: Activations
) -> Weights:
    """The weights of `checkpoint` as they are loaded with these options."""
    weights = checkpoint.weights
    if device.type == "meta":
        weights = WeightShapes(weights, checkpoint.config, checkpoint.has_four_bit)
    if quantization is not None:
        # Quantised before sharding, so that any number of ranks computes with the same values
        weights = QuantizedWeights(weights, quantization, device)
    if activations == "float32" and device.type == "cpu":
        weights = Float32Activations(weights)
    return weights
