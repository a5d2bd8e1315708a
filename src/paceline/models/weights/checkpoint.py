"""A checkpoint, independent of its file format.

Weights have their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`) and row order in every format. They are read on
demand, so that a model is never in memory twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.formats.quantized import Quantization, QuantizedWeight, quantize
from paceline.kernels.formats.weights import Dense, FourBit, Grouped, Weight, grouped
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.families.spec import DecoderSpec

ROUTER = ".mlp.gate.weight"
"""End of the name of a router."""


class Weights(Protocol):
    """Named weights of one checkpoint."""

    def names(self) -> frozenset[str]: ...

    def matrix(self, name: str) -> Weight:
        """[N, K] as stored, possibly quantised."""
        ...

    def vector(self, name: str) -> Tensor:
        """[N] float32: norms and biases."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    name: str
    config: DecoderSpec
    weights: Weights
    read_tokenizer: Callable[[], Tokenizer]
    """Reads the tokenizer, which takes about a second."""
    files: tuple[Path, ...] = ()
    """Files that hold the weights; none if they are generated."""
    growth: float = 1.0
    """Upper bound of loaded bytes per byte of the files, if the matrices stay quantised."""
    has_four_bit: bool = False
    """Whether matrices of its layers are `FourBit`."""


class DerivedWeights:
    """`Weights` whose matrices are made from those of other `Weights`."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def names(self) -> frozenset[str]:
        return self._weights.names()

    def vector(self, name: str) -> Tensor:
        return self._weights.vector(name)


class QuantizedWeights(DerivedWeights):
    """`Weights` whose layer matrices are quantised on `device`, with one scale per output. Embedding, head and routers are not:
    the embedding is a lookup, rounding the head changes every logit, and rounding a router changes the experts of tokens.

    Quantised matrices are kept, unless the device would unpack them: only a CPU keeps the codes of a GGUF file.
    """

    def __init__(self, weights: Weights, kind: Quantization, device: torch.device) -> None:
        super().__init__(weights)
        self._kind, self._device = kind, device

    def matrix(self, name: str) -> Weight:
        weight = self._weights.matrix(name)
        is_layer = name.startswith("model.layers.") and not name.endswith(ROUTER)
        if not is_layer or not self._is_unpacked(weight):
            return weight
        values = weight.values.to(self._device) if isinstance(weight, Dense) else weight.dequantize().to(self._device)
        return quantize(values, self._kind)

    def _is_unpacked(self, weight: Weight) -> bool:
        is_file = isinstance(weight, Grouped) and not isinstance(weight, FourBit)
        return isinstance(weight, Dense) or (is_file and self._device.type != "cpu")


class Float32Activations(DerivedWeights):
    """`Weights` whose products on a CPU do not round activations."""

    def matrix(self, name: str) -> Weight:
        weight = self._weights.matrix(name)
        if isinstance(weight, QuantizedWeight):
            weight = grouped(weight) or weight
        return replace(weight, activations="float32") if isinstance(weight, Grouped) else weight
