"""A checkpoint in neutral form: what a safetensors folder and a GGUF file have in common.

Weights go by their Hugging Face names (`model.layers.0.self_attn.q_proj.weight`) and row order, whatever the file calls
them, and are read when asked for, so that a model is never in memory twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from paceline.kernels.weights import Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.tokenizer.tokenizer import Tokenizer


class Weights(Protocol):
    """Named weights of one checkpoint."""

    def names(self) -> frozenset[str]: ...

    def matrix(self, name: str) -> Weight:
        """[N, K] as stored, quantised weights included."""
        ...

    def vector(self, name: str) -> Tensor:
        """[N] float32: norms and biases."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    name: str
    config: ModelConfig
    weights: Weights
    read_tokenizer: Callable[[], Tokenizer]
    """Reading a vocabulary costs about a second: only on demand."""
