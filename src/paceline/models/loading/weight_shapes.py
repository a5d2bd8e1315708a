"""Weights without values, on the device `meta`: the types and shapes that the choice of kernels depends on."""

import torch
from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.gpu_model import META
from paceline.kernels.quantized import QuantizedWeight
from paceline.kernels.weights import Dense, Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.loading.checkpoint import Weights
from paceline.models.loading.prequantized import SCALES


class WeightShapes:
    """`Weights` of a checkpoint whose values are not read. Its 8-bit matrices stay 8-bit matrices."""

    def __init__(self, weights: Weights, config: ModelConfig) -> None:
        self._weights, self._config = weights, config
        self._names = weights.names()

    def names(self) -> frozenset[str]:
        return self._names

    def matrix(self, name: str) -> Weight:
        stem = name.removesuffix("weight")
        if any(stem + scale in self._names for scale in SCALES):
            stored = self._weights.matrix(name)  # a mapped file: no values are read
            assert isinstance(stored, QuantizedWeight)
            return QuantizedWeight(stored.values.to(META), stored.scales.to(META))
        return Dense(torch.empty(self._shape(name), dtype=torch.bfloat16, device=META))

    def vector(self, name: str) -> Tensor:
        config, (*_, owner, kind) = self._config, name.split(".")
        sizes = {"q_norm": config.head_dim, "k_norm": config.head_dim}
        if kind == "bias":
            sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        return torch.empty(sizes.get(owner, config.hidden_size), device=META)

    def _shape(self, name: str) -> tuple[int, int]:
        config, owner = self._config, name.split(".")[-2]
        shapes = {
            "embed_tokens": (config.vocab_size, config.hidden_size),
            "lm_head": (config.vocab_size, config.hidden_size),
            "q_proj": (config.q_size, config.hidden_size),
            "k_proj": (config.kv_size, config.hidden_size),
            "v_proj": (config.kv_size, config.hidden_size),
            "o_proj": (config.hidden_size, config.q_size),
            "gate_proj": (config.ffn_size, config.hidden_size),
            "up_proj": (config.ffn_size, config.hidden_size),
            "down_proj": (config.hidden_size, config.ffn_size),
        }
        if owner not in shapes:
            raise UnsupportedModel(f"the shape of {name} is unknown: kernels cannot be compiled ahead for this model")
        return shapes[owner]
