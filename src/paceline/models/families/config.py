"""Configuration of a decoder, read from a Hugging Face config.json or from GGUF metadata.

Features that the forward pass does not support are rejected here, by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import Activation
from paceline.kernels.rope import FrequencyFactors, RopeScaling
from paceline.model_files import Metadata
from paceline.models.families.families import ARCHITECTURES, family_options
from paceline.models.families.prequantized import check_scheme
from paceline.models.families.rope import scaling_from_gguf

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported architectures of GGUF files, by `general.architecture`; Mistral files have the name llama."""
EXPERT_MULTIPLE = 32
"""The width of a model with experts, and that of an expert, are multiples of it: outputs of a tile of the CPU kernels."""

# Largest values that a checkpoint may declare; each is several times that of the largest published model.
_VOCABULARY, _WIDTH, _LAYERS, _HEADS, _HEAD_DIM, _POSITIONS = 1 << 22, 1 << 20, 4096, 4096, 4096, 1 << 24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that the forward pass needs in addition to the weights."""

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
    """Number of tokens that a token attends to, itself included. None if it attends to all."""
    full_layers: tuple[int, ...] = ()
    """Layers without the sliding window of the other layers."""
    local_rope_theta: float | None = None
    """Theta of layers with a sliding window, without scaling (Gemma 3). If None, they use `rope_theta` and `rope_scaling`."""
    attention_scale: float | None = None
    """Factor of attention scores. If None, it is head_dim ** -0.5."""
    has_sinks: bool = False
    """One more score per head in the softmax of attention, without a value (gpt-oss)."""
    has_output_norms: bool = False
    """RMS norms of the outputs of attention and of the feed-forward layer, before they are added (Gemma 3)."""
    embedding_scale: float = 1.0
    activation: Activation = "silu"
    output_bias: bool = False
    """Biases on the output of attention, on the router and on the experts (gpt-oss)."""
    num_experts: int = 0
    """Number of experts of a feed-forward layer, each of `ffn_size`. 0 if the layer is dense."""
    experts_per_token: int = 0
    normalizes_experts: bool = True
    """Whether the weights of a token's experts add up to 1; otherwise those of all experts do."""
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
        if self.num_experts:
            self._check_experts()

    def _check_experts(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UnsupportedModel(f"{self.experts_per_token} of {self.num_experts} experts per token are not possible")
        if self.hidden_size % EXPERT_MULTIPLE or self.ffn_size % EXPERT_MULTIPLE:
            raise UnsupportedModel(
                f"experts of {self.hidden_size} inputs and a width of {self.ffn_size} are not supported: "
                f"both must be multiples of {EXPERT_MULTIPLE}"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def window(self, layer: int) -> int | None:
        """Number of tokens that a token attends to in a layer, itself included. None if it attends to all."""
        return None if layer in self.full_layers else self.sliding_window

    def rotary_number(self, layer: int) -> int:
        """Number of a layer's rotary table: 1 for a layer with a window in a model with `local_rope_theta`, otherwise 0."""
        return int(self.local_rope_theta is not None and self.window(layer) is not None)

    @property
    def num_rotary_tables(self) -> int:
        return 1 if self.local_rope_theta is None else 2

    def attended(self, context: int) -> int:
        """Tokens of a context that a token attends to, averaged over the layers."""
        if self.sliding_window is None:
            return context
        full = sum(layer < self.num_layers for layer in self.full_layers)
        windowed = min(context, self.sliding_window)
        return (full * context + (self.num_layers - full) * windowed) // self.num_layers

    @property
    def num_parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        attention += self.attention_bias * (self.q_size + 2 * self.kv_size) + self.qk_norm * 2 * self.head_dim
        attention += self.output_bias * self.hidden_size + self.has_sinks * self.num_heads
        inner = 3 * self.hidden_size * self.ffn_size
        if self.num_experts:
            expert = inner + self.output_bias * (2 * self.ffn_size + self.hidden_size)
            inner = self.num_experts * (expert + self.hidden_size + self.output_bias)
        layer = attention + inner + (4 if self.has_output_norms else 2) * self.hidden_size
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return tables + self.num_layers * layer + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of one token in the KV cache, over all layers."""
        return 2 * self.num_layers * self.kv_size * bytes_per_value

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Reads config.json, as written by transformers 4 or 5."""
        fields = Metadata("config.json", config)
        architecture = fields.text("model_type", "unknown")
        _check_architecture(architecture, ARCHITECTURES)
        check_scheme(fields)
        hidden, heads = fields.count("hidden_size", _WIDTH), fields.count("num_attention_heads", _HEADS)
        return cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size", _VOCABULARY),
            hidden_size=hidden,
            num_layers=fields.count("num_hidden_layers", _LAYERS),
            num_heads=heads,
            num_kv_heads=fields.count("num_key_value_heads", _HEADS, heads),
            head_dim=fields.count("head_dim", _HEAD_DIM, max(1, hidden // heads)),
            rms_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
            max_position=fields.count("max_position_embeddings", _POSITIONS, 2048),
            **family_options(architecture, fields, config),
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
        _check_architecture(architecture, GGUF_ARCHITECTURES)
        fields = Metadata(
            "the GGUF header", {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
        )
        if "expert_count" in fields and fields.count("expert_count", _HEADS, least=0):
            raise UnsupportedModel("mixture-of-experts models are supported as safetensors folders, not as GGUF files")
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


def _check_architecture(name: str, supported: tuple[str, ...]) -> None:
    if name not in supported:
        raise UnsupportedModel(f"architecture {name!r:.80} is not supported; supported: {', '.join(supported)}")
