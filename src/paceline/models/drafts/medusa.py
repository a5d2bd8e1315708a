"""Medusa: heads on the target's last hidden state. Head k predicts the token k positions further on; there is no cache."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from paceline.core.errors import UnsupportedModel
from paceline.kernels.linear import linear
from paceline.models.architectures.llama import DecoderModel
from paceline.models.drafts.vocabulary import DraftVocabulary, prepare_draft
from paceline.models.loading.checkpoint import Weights
from paceline.models.metadata import Metadata


class MedusaModel:
    """h_k = h + silu(W_k h + b_k), k = 1..H. From the state of token i, head k predicts token i + 1 + k."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, target: DecoderModel) -> None:
        fields = Metadata("config.json of the draft", config)
        self.num_heads, self.hidden_size = fields.count("num_heads", 64), fields.count("hidden_size", 1 << 20)
        self.vocabulary = DraftVocabulary.of(target, weights, self.hidden_size)
        names = [f"heads.{k}" for k in range(1, self.num_heads + 1)]
        for name in names:
            if weights.matrix(f"{name}.weight").shape != (self.hidden_size, self.hidden_size):
                raise UnsupportedModel(f"{name}.weight is not a square matrix of {self.hidden_size} rows")
            if weights.vector(f"{name}.bias").shape != (self.hidden_size,):
                raise UnsupportedModel(f"{name}.bias does not have {self.hidden_size} values")
        self.weights = [prepare_draft(weights.matrix(f"{name}.weight"), target.device, target.dtype) for name in names]
        self.biases = [weights.vector(f"{name}.bias").to(target.device, target.dtype) for name in names]
        self.weight_bytes = sum(weight.nbytes for weight in self.weights) + self.vocabulary.nbytes

    def logits(self, last_hidden: Tensor) -> Tensor:
        """[S, H, V'] float32 from the target's states after its final norm, [S, D], or wider if the target is inflated."""
        rows, h = len(last_hidden), last_hidden[:, : self.hidden_size].contiguous()
        states = [h + silu(linear(h, weight, bias)) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return self.vocabulary.logits(torch.cat(states)).unflatten(0, (self.num_heads, rows)).transpose(0, 1)
