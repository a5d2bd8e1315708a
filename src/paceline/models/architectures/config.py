"""Configuration of a decoder, read from a Hugging Face config.json or from GGUF metadata.

Features that the forward pass does not support are rejected here, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.models.architectures.rope import FrequencyFactors, RopeScaling, rope_from_hf, scaling_from_gguf
from paceline.models.loading.prequantized import check_scheme
from paceline.models.metadata import Metadata

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported architectures, by their `model_type` in config.json. GGUF files use the same names, except for mistral."""

# Largest values that a checkpoint may declare; each is several times that of the largest published model.
_VOCABULARY, _WIDTH, _LAYERS, _HEADS, _HEAD_DIM, _POSITIONS = 1 << 22, 1 << 20, 4096, 4096, 4096, 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass needs besides the weights."""

    architecture: str
    vocab_size: int
    """Rows of the embedding; a padded vocabulary has more than the tokenizer."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    rms_eps: float
    rope_theta: float
    max_position: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Biases on q, k and v (Qwen2)."""
    qk_norm: bool = False
    """RMS norm of each head of q and k before the rotation (Qwen3)."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included; None: all."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads do not divide into {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise UnsupportedModel(f"heads of {self.head_dim} values have no rotary pairs: the size must be even")
        if isinstance(self.rope_scaling, FrequencyFactors) and len(self.rope_scaling.factors) != self.head_dim // 2:
            found = len(self.rope_scaling.factors)
            raise UnsupportedModel(
                f"rope_freqs.weight has {found} factors, and the heads have {self.head_dim // 2} pairs"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        attention += self.attention_bias * (self.q_size + 2 * self.kv_size) + self.qk_norm * 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.ffn_size + 2 * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + self.num_layers * layer + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """From config.json, as written by transformers 4 or 5."""
        fields = Metadata("config.json", config)
        architecture = fields.text("model_type", "unknown")
        _check_architecture(architecture)
        _reject_unsupported(config, architecture)
        check_scheme(fields)
        hidden, heads = fields.count("hidden_size", _WIDTH), fields.count("num_attention_heads", _HEADS)
        theta, scaling = rope_from_hf(config)
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size", _VOCABULARY),
            hidden_size=hidden,
            num_layers=fields.count("num_hidden_layers", _LAYERS),
            num_heads=heads,
            num_kv_heads=fields.count("num_key_value_heads", _HEADS, heads),
            head_dim=fields.count("head_dim", _HEAD_DIM, max(1, hidden // heads)),
            ffn_size=fields.count("intermediate_size", _WIDTH),
            rms_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
            rope_theta=theta,
            max_position=fields.count("max_position_embeddings", _POSITIONS, 2048),
            rope_scaling=scaling,
            tie_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_hf_sliding_window(fields, architecture),
            bos_id=fields.token_id("bos_token_id"),
            eos_ids=fields.token_ids("eos_token_id"),
        )

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        vocab_size: int,
        tie_embeddings: bool,
        frequency_factors: tuple[float, ...] | None = None,
    ) -> "ModelConfig":
        """From GGUF metadata, and from tensors where the metadata is incomplete.

        `frequency_factors` is the tensor rope_freqs.weight, which holds the rope scaling of Llama 3 files.
        """
        architecture = Metadata("the GGUF header", metadata).text("general.architecture", "unknown")
        _check_architecture(architecture)
        fields = Metadata(
            "the GGUF header", {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
        )
        if "expert_count" in fields and fields.count("expert_count", _HEADS, least=0):
            raise UnsupportedModel("mixture-of-experts models are not supported")
        hidden, heads = fields.count("embedding_length", _WIDTH), fields.count("attention.head_count", _HEADS)
        head_dim = fields.count("attention.key_length", _HEAD_DIM, max(1, hidden // heads))
        if fields.count("rope.dimension_count", _HEAD_DIM, head_dim) != head_dim:
            raise UnsupportedModel("rotary embeddings over a part of the head (rope.dimension_count) are not supported")
        has_window = "attention.sliding_window" in fields
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=fields.count("block_count", _LAYERS),
            num_heads=heads,
            num_kv_heads=fields.count("attention.head_count_kv", _HEADS, heads),
            head_dim=head_dim,
            ffn_size=fields.count("feed_forward_length", _WIDTH),
            rms_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            rope_theta=fields.number("rope.freq_base", 1.0, 1e12, 10000.0),
            max_position=fields.count("context_length", _POSITIONS),
            rope_scaling=FrequencyFactors(frequency_factors) if frequency_factors else scaling_from_gguf(fields),
            tie_embeddings=tie_embeddings,
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=fields.count("attention.sliding_window", _POSITIONS) if has_window else None,
            bos_id=fields.token_id("tokenizer.ggml.bos_token_id"),
            eos_ids=fields.token_ids("tokenizer.ggml.eos_token_id"),
        )


def _check_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name!r:.80} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _reject_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    """Raise `UnsupportedModel` for options of a supported `model_type` that the forward pass lacks."""
    unsupported = (
        ("hidden_act", "silu", "an activation other than silu"),
        ("mlp_bias", False, "a bias in the feed-forward layers"),
        ("attention_bias", architecture == "qwen2", "an attention bias outside Qwen2"),
        ("partial_rotary_factor", 1.0, "a rotary embedding over a part of the head"),
        ("num_local_experts", None, "a mixture of experts"),
    )
    for key, expected, meaning in unsupported:
        found = config.get(key)
        if found is not None and found != expected:
            raise UnsupportedModel(f"config.json has {key}={found!r:.80}: {meaning} is not supported")


def _hf_sliding_window(fields: Metadata, architecture: str) -> int | None:
    if architecture == "llama" or "sliding_window" not in fields:
        return None
    window = fields.count("sliding_window", _POSITIONS)
    if architecture == "mistral":
        return window
    if not fields.flag("use_sliding_window", False):
        return None
    # Qwen uses the window from layer `max_window_layers` on; `layer_types` lists it per layer.
    first, layers = fields.count("max_window_layers", _LAYERS, 0, least=0), fields.count("num_hidden_layers", _LAYERS)
    kinds = {"full_attention"} if first else set()
    kinds |= {"sliding_attention"} if layers > first else set()
    if fields.raw("layer_types"):
        kinds = set(fields.array("layer_types", str))
    if len(kinds) > 1:
        raise UnsupportedModel("a sliding window on some layers only is not supported")
    return window if kinds == {"sliding_attention"} else None
