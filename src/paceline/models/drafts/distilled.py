"""A distilled draft: a small Llama trained on its target's outputs, which uses its target's embedding and head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.kernels.rms_norm import rms_norm
from paceline.kernels.weights import Weight
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.llama import DecoderModel
from paceline.models.drafts.vocabulary import DraftVocabulary, embedding_for
from paceline.models.loading.checkpoint import Weights


class DistilledModel(DecoderModel):
    """`DecoderModel` with the target's embedding and head, and a norm after the embedding. Its logits cover the target's
    vocabulary even if its own is reduced."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, target: DecoderModel) -> None:
        width = int(config["hidden_size"])
        vocabulary = DraftVocabulary.of(target, weights, width)
        tables = embedding_for(target, width), vocabulary.head
        super().__init__(
            _model_config(config, target.config), _RenamedWeights(weights), target.device, target.dtype, tables
        )
        self.vocabulary = vocabulary
        self._table_bytes = vocabulary.nbytes + (0 if tables[0] is target.embedding else tables[0].nbytes)
        self.embed_norm = weights.vector("embed_norm.weight").to(target.device, target.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that are not shared with the target."""
        layers = (m for layer in self.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return sum(m.nbytes for m in layers) + self._table_bytes

    def embed(self, tokens: Tensor) -> Tensor:
        return rms_norm(super().embed(tokens), self.embed_norm, self.config.rms_eps)

    @property
    def has_plain_embedding(self) -> bool:
        return False

    def expand_logits(self, logits: Tensor) -> Tensor:
        return self.vocabulary.expand_logits(logits)


class _RenamedWeights:
    """The weights under the names that `DecoderModel` expects."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def names(self) -> frozenset[str]:
        return frozenset(f"model.{name}" for name in self._weights.names())

    def matrix(self, name: str) -> Weight:
        return self._weights.matrix(name.removeprefix("model."))

    def vector(self, name: str) -> Tensor:
        return self._weights.vector(name.removeprefix("model."))


def _model_config(config: Mapping[str, Any], target: ModelConfig) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=config["hidden_size"],
        num_layers=config["num_layers"],
        num_heads=config["num_heads"],
        num_kv_heads=config["num_kv_heads"],
        head_dim=config["head_dim"],
        ffn_size=config["ffn_size"],
        rms_eps=config["rms_eps"],
        rope_theta=config["rope_theta"],
        max_position=config["max_position"],
        rope_scaling=target.rope_scaling,
        tie_embeddings=target.tie_embeddings,
    )
