"""Configuration of a decoder, read from a Hugging Face config.json or from GGUF metadata.

Features that the forward pass does not support are rejected here, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.models.architectures.rope import FrequencyFactors, RopeScaling, rope_from_hf, scaling_from_gguf
from paceline.models.loading.prequantized import check_scheme

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""Supported architectures, by their `model_type` in config.json. GGUF files use the same names, except for mistral."""


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
        architecture = config.get("model_type", "unknown")
        _check_architecture(architecture)
        _reject_unsupported(config, architecture)
        check_scheme(config.get("quantization_config"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        theta, scaling = rope_from_hf(config)
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn_size=config["intermediate_size"],
            rms_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_position=config.get("max_position_embeddings", 2048),
            rope_scaling=scaling,
            tie_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_hf_sliding_window(config, architecture),
            bos_id=config.get("bos_token_id"),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
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
        architecture = metadata.get("general.architecture", "unknown")
        _check_architecture(architecture)
        fields = {k.removeprefix(f"{architecture}."): v for k, v in metadata.items()}
        if fields.get("expert_count"):
            raise UnsupportedModel("mixture-of-experts models are not supported")
        hidden, heads = fields["embedding_length"], fields["attention.head_count"]
        head_dim = fields.get("attention.key_length", hidden // heads)
        if fields.get("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel("rotary embeddings over a part of the head (rope.dimension_count) are not supported")
        eos = fields.get("tokenizer.ggml.eos_token_id")
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_layers=fields["block_count"],
            num_heads=heads,
            num_kv_heads=fields.get("attention.head_count_kv", heads),
            head_dim=head_dim,
            ffn_size=fields["feed_forward_length"],
            rms_eps=fields["attention.layer_norm_rms_epsilon"],
            rope_theta=fields.get("rope.freq_base", 10000.0),
            max_position=fields["context_length"],
            rope_scaling=FrequencyFactors(frequency_factors) if frequency_factors else scaling_from_gguf(fields),
            tie_embeddings=tie_embeddings,
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=fields.get("attention.sliding_window"),
            bos_id=fields.get("tokenizer.ggml.bos_token_id"),
            eos_ids=() if eos is None else (eos,),
        )


def _check_architecture(name: str) -> None:
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")


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
            raise UnsupportedModel(f"config.json has {key}={found!r}: {meaning} is not supported")


def _hf_sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    window = config.get("sliding_window")
    if architecture == "llama" or window is None:
        return None
    if architecture == "mistral":
        return window
    if not config.get("use_sliding_window", False):
        return None
    # Qwen uses the window from layer `max_window_layers` on; `layer_types` lists it per layer.
    first, layers = config.get("max_window_layers", 0), config["num_hidden_layers"]
    kinds = set(config.get("layer_types") or ["full_attention"] * first + ["sliding_attention"] * (layers - first))
    if len(kinds) > 1:
        raise UnsupportedModel("a sliding window on some layers only is not supported")
    return window if kinds == {"sliding_attention"} else None
