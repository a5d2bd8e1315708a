"""A distilled draft: a small Llama trained on its target's outputs, which uses its target's embedding and head."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.weights import Weight
from paceline.kernels.rms_norm import rms_norm
from paceline.model_files import Metadata
from paceline.models.decoder import DecoderModel
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.vocabulary import DraftVocabulary, embedding_for
from paceline.models.weights import Weights, check_weights


class DistilledModel(DecoderModel):
    """`DecoderModel` with the target's embedding and head, and a norm after the embedding. Its logits cover the target's
    vocabulary even if its own is reduced."""

    def __init__(self, config: Mapping[str, Any], weights: Weights, target: DecoderModel) -> None:
        shape = distilled_config(config, target.config)
        width, renamed = shape.hidden_size, _RenamedWeights(weights)
        check_weights(shape, renamed.shape, has_tables=False)
        vocabulary = DraftVocabulary.of(target, weights, width)
        tables = embedding_for(target, width), vocabulary.head
        super().__init__(shape, renamed, target.device, target.dtype, tables)
        self.vocabulary = vocabulary
        self._table_bytes = vocabulary.nbytes + (0 if tables[0] is target.embedding else tables[0].nbytes)
        embed_norm = weights.vector("embed_norm.weight")
        if embed_norm.shape != (width,):
            raise UnsupportedModel(f"embed_norm.weight does not have {width} values")
        self.embed_norm = embed_norm.to(target.device, target.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes that are not shared with the target."""
        return sum(m.nbytes for layer in self.layers for m in layer.matrices) + self._table_bytes

    def embed(self, tokens: Tensor) -> Tensor:
        return rms_norm(super().embed(tokens), self.embed_norm, self.config.rms_eps)

    @property
    def has_plain_embedding(self) -> bool:
        return False

    @property
    def has_plain_logits(self) -> bool:
        return False

    def expand_logits(self, logits: Tensor) -> Tensor:
        return self.vocabulary.expand_logits(logits)


class _RenamedWeights:
    """The weights under the names that `DecoderModel` expects."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def names(self) -> frozenset[str]:
        return frozenset(f"model.{name}" for name in self._weights.names())

    def shape(self, name: str) -> tuple[int, ...]:
        is_vector = name.endswith("norm.weight")
        return tuple((self.vector(name) if is_vector else self.matrix(name)).shape)

    def matrix(self, name: str) -> Weight:
        return self._weights.matrix(name.removeprefix("model."))

    def vector(self, name: str) -> Tensor:
        return self._weights.vector(name.removeprefix("model."))


def distilled_config(config: Mapping[str, Any], target: DecoderSpec) -> DecoderSpec:
    fields = Metadata("config.json of the draft", config)
    return flat_spec(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=fields.count("hidden_size", 1 << 20),
        num_layers=fields.count("num_layers", 4096),
        num_heads=fields.count("num_heads", 4096),
        num_kv_heads=fields.count("num_kv_heads", 4096),
        head_dim=fields.count("head_dim", 4096),
        ffn_size=fields.count("ffn_size", 1 << 20),
        rms_eps=fields.number("rms_eps", 0.0, 1.0),
        rope_theta=fields.number("rope_theta", 1.0, 1e12),
        max_position=min(fields.count("max_position", 1 << 24), target.max_position),  # it drafts no position beyond
        rope_scaling=target.rotary[0].scaling,
        tie_embeddings=target.tie_embeddings,
    )
