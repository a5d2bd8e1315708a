"""What a family reads from config.json or from the metadata of a GGUF file, and the parts of a `DecoderSpec` from it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import Activation
from paceline.kernels.rope import FrequencyFactors, RopeScaling
from paceline.model_files import Metadata
from paceline.models.families.layers import (
    DenseFeedForward,
    FeedForward,
    Heads,
    Norms,
    QueryScale,
    Rotary,
    RoutedExperts,
    Windows,
    make_layers,
)
from paceline.models.families.rope import rope_from_hf, scaling_from_gguf
from paceline.models.families.spec import DecoderSpec

# Largest values that a checkpoint may declare; each is several times that of the largest published model.
VOCABULARY, WIDTH, LAYERS, HEADS, HEAD_DIM, POSITIONS, EXPERTS = 1 << 22, 1 << 20, 4096, 4096, 4096, 1 << 24, 4096


class Fields:
    """The values of one config.json. `require` refuses options that the forward pass does not support, by name."""

    bos_key, eos_key = "bos_token_id", "eos_token_id"
    layer_types_key = "layer_types"

    def __init__(self, architecture: str, values: Metadata, config: Mapping[str, Any]) -> None:
        """`config` has the values as they are in the file."""
        self.architecture, self.values, self.config = architecture, values, config
        self.hidden_size = values.count("hidden_size", WIDTH)
        self.num_heads = values.count("num_attention_heads", HEADS)
        self.vocab_size = values.count("vocab_size", VOCABULARY)
        self.num_layers = values.count("num_hidden_layers", LAYERS)
        self.num_kv_heads = values.count("num_key_value_heads", HEADS, self.num_heads)
        self.head_dim = values.count("head_dim", HEAD_DIM, max(1, self.hidden_size // self.num_heads))
        self.rms_eps = values.number("rms_norm_eps", 0.0, 1.0, 1e-6)
        self.max_position = values.count("max_position_embeddings", POSITIONS, 2048)

    def require(self, *options: tuple[str, object, str]) -> None:
        """Raise `UnsupportedModel` for an option (key, supported value, meaning of other values) with another value."""
        for key, expected, meaning in options:
            found = self.config.get(key)
            if found is not None and found != expected:
                raise UnsupportedModel(f"config.json has {key}={found!r:.80}: {meaning} is not supported")

    def require_plain(
        self, has_attention_bias: bool = False, has_experts: bool = False, has_partial_rotary: bool = False
    ) -> None:
        """Refuse the options of Llama's config.json that change what a layer computes."""
        self.require(
            ("hidden_act", "silu", "an activation other than silu"),
            ("mlp_bias", False, "a bias in the feed-forward layers"),
            ("attention_bias", has_attention_bias, "an attention bias outside Qwen2"),
        )
        if not has_partial_rotary and self._rotary_share() != 1.0:
            raise UnsupportedModel(
                f"config.json has partial_rotary_factor={self._rotary_share()}: a rotary embedding over a part of the head "
                "is not supported in this family"
            )
        if not has_experts:
            self.require(("num_local_experts", None, "a mixture of experts in this family"))

    def heads(
        self,
        has_bias: bool = False,
        has_output_bias: bool = False,
        has_qk_norm: bool = False,
        has_sinks: bool = False,
        score_scale: float | None = None,
        score_cap: float | None = None,
        has_joined_qk_norm: bool = False,
        query_scale: QueryScale | None = None,
    ) -> Heads:
        return Heads(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            score_scale,
            has_bias,
            has_output_bias,
            has_qk_norm,
            has_sinks,
            score_cap,
            has_joined_qk_norm,
            query_scale,
        )

    def query_scale(self) -> QueryScale | None:
        """The growth of queries with the position. None if the file has none."""
        rope = self.values.section("rope_parameters")
        if "llama_4_scaling_beta" not in rope:
            return None
        period = rope.count("original_max_position_embeddings", POSITIONS)
        return QueryScale(rope.number("llama_4_scaling_beta", 0.0, 1e3), period)

    def key(self, name: str) -> str:
        """The name of a value of config.json in this file."""
        return name

    def factor(self, name: str, default: float = 1.0) -> float:
        """A multiplier of embeddings, residuals, scores, logits or experts."""
        return self.values.number(self.key(name), 1e-6, 1e6, default)

    def scored_experts(self) -> RoutedExperts:
        """Experts that are chosen by a sigmoid and a bias, and a shared one for all tokens, as in DeepSeek V3."""
        count, width = self.values.count, self.values.count(self.key("moe_intermediate_size"), WIDTH)
        num_groups = count(self.key("n_group"), EXPERTS, 1)
        return RoutedExperts(
            count(self.key("n_routed_experts"), EXPERTS),
            count(self.key("num_experts_per_tok"), EXPERTS),
            width,
            normalizes=self.values.flag(self.key("norm_topk_prob"), True),
            scoring="sigmoid",
            has_choice_bias=True,
            scale=self.factor("routed_scaling_factor"),
            shared_width=width * count(self.key("n_shared_experts"), EXPERTS, 1, least=0),
            num_groups=num_groups,
            kept_groups=count(self.key("topk_group"), EXPERTS, num_groups),
        )

    def has_qk_norm(self) -> bool:
        return self.values.flag("use_qk_norm", False)

    def has_attention_bias(self) -> bool:
        return self.values.flag("attention_bias", False)

    def num_dense_layers(self) -> int:
        """Layers before the first one with experts."""
        return min(self.num_layers, self.values.count(self.key("first_k_dense_replace"), LAYERS, 1, least=0))

    def cap(self, key: str, default: float | None = None) -> float | None:
        """A limit of scores or logits. None if the file has a null, or nothing and no `default`."""
        if (default is None or key in self.config) and key not in self.values:
            return None
        return self.values.number(key, 1e-3, 1e6, default)

    def dense(self, activation: Activation = "silu") -> DenseFeedForward:
        return DenseFeedForward(self.values.count("intermediate_size", WIDTH), activation)

    def experts(
        self, activation: Activation = "silu", normalizes: bool = True, has_bias: bool = False
    ) -> RoutedExperts:
        values = self.values
        return RoutedExperts(
            values.count("num_experts" if "num_experts" in values else "num_local_experts", EXPERTS),
            values.count("num_experts_per_tok", EXPERTS),
            values.count("moe_intermediate_size" if "moe_intermediate_size" in values else "intermediate_size", WIDTH),
            activation,
            normalizes,
            has_bias,
        )

    def rotary(self, default_theta: float = 10000.0) -> Rotary:
        return Rotary(self.head_dim, *rope_from_hf(self.config, default_theta))

    def partial_rotary(self, default_share: float) -> Rotary:
        """The rotary embedding of a part of the head: the share of config.json, or `default_share`."""
        return Rotary(self.head_dim, *rope_from_hf(self.config), int(self.head_dim * self._rotary_share(default_share)))

    def rotary_by_window(self, default_theta: float, local_theta: float | None = None) -> tuple[Rotary, Rotary]:
        """That of the layers without a window, and that of the layers with one, which has no scaling. Configurations without
        a section for each kind of layer have one theta, or `local_theta` for the second."""
        rope = self.values.section("rope_parameters")
        kinds = ("full_attention", "sliding_attention")
        if not any(kind in rope for kind in kinds):
            full = self.rotary(default_theta)
            return full, Rotary(self.head_dim, local_theta or full.theta)
        full, local = (
            Rotary(self.head_dim, *rope_from_hf({"rope_parameters": rope.raw(kind) or {}}, default))
            for kind, default in zip(kinds, (default_theta, local_theta or default_theta), strict=True)
        )
        if local.scaling is not None:
            raise UnsupportedModel("config.json has a rope scaling of the layers with a sliding window")
        return full, local

    def _rotary_share(self, default: float = 1.0) -> float:
        key, rope = "partial_rotary_factor", self.values.section("rope_parameters")
        return rope.number(key, 0.0, 1.0, self.values.number(key, 0.0, 1.0, default))

    def original_positions(self) -> int:
        """Positions that the model was trained with before its context was extended."""
        return self.values.count("original_max_position_embeddings", POSITIONS, self.max_position)

    def local_theta(self) -> float:
        """Base of the rotary embedding of layers with a window, in a family that has two."""
        return self.values.number("rope_local_base_freq", 1.0, 1e12, 10000.0)

    def has_window(self) -> bool:
        return "sliding_window" in self.values

    def window(self, default: int | None = None) -> int:
        return self.values.count("sliding_window", POSITIONS, default)

    def windows(self, full_layers: Sequence[int] = (), default: int | None = None) -> Windows:
        """The window of config.json in all layers but `full_layers`, or but those that `layer_types` lists, if it is there."""
        window = self.window(default)
        full = self.full_layers() if self.values.raw(self.layer_types_key) else full_layers
        return [None if number in full else window for number in range(self.num_layers)]

    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window, from `layer_types`."""
        kinds = self.layer_types()
        unknown = sorted({*kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise UnsupportedModel(f"config.json has layers of the type {unknown[0][:60]!r}, which is not supported")
        return tuple(number for number, kind in enumerate(kinds) if kind == "full_attention")

    def layer_types(self) -> list[str]:
        return self.values.array("layer_types", str, self.num_layers)

    def decoder(
        self,
        heads: Heads | Sequence[Heads],
        ffn: FeedForward | Sequence[FeedForward],
        windows: Windows | None = None,
        rotary: tuple[Rotary, ...] = (),
        layer_rotary: Sequence[int] | None = None,
        norms: Norms = "pre",
        embedding_scale: float = 1.0,
        residual_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_cap: float | None = None,
        ties_by_default: bool = False,
    ) -> DecoderSpec:
        """A model whose layers are alike but for their window and rotary embedding, and their attention and feed-forward layer
        if `heads` or `ffn` has one for each. Without `layer_rotary`, layers with a
        window use the second of two rotary embeddings."""
        rotary = rotary or (self.rotary(),)
        windows = self.chosen_windows(windows)
        layer_rotary = layer_rotary or [int(len(rotary) > 1 and window is not None) for window in windows]
        return DecoderSpec(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            rms_eps=self.rms_eps,
            max_position=self.max_position,
            rotary=rotary,
            layers=make_layers(heads, ffn, norms, windows, layer_rotary),
            tie_embeddings=self.ties(ties_by_default),
            embedding_scale=embedding_scale,
            residual_scale=residual_scale,
            logit_scale=logit_scale,
            logit_cap=logit_cap,
            bos_id=self.values.token_id(self.bos_key),
            eos_ids=self.values.token_ids(self.eos_key),
        )

    def chosen_windows(self, windows: Windows | None) -> Windows:
        return windows or [None] * self.num_layers

    def ties(self, default: bool) -> bool:
        return self.values.flag("tie_word_embeddings", default)


_GGUF_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "first_k_dense_replace": "leading_dense_block_count",
}


class GGUFFields(Fields):
    """The values of a GGUF header, whose keys are without the architecture. Those that it does not have are in its tensors: the
    size of the vocabulary, whether the head is the embedding, whether attention has biases and norms, and the scaling of the
    rotary embedding of Llama 3."""

    bos_key, eos_key = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"
    layer_types_key = "attention.sliding_window_pattern"

    def __init__(
        self,
        architecture: str,
        values: Metadata,
        vocab_size: int,
        tie_embeddings: bool,
        frequency_factors: tuple[float, ...] | None,
        names: Collection[str],
    ) -> None:
        """`names` are those of the tensors."""
        self._names = names
        self.architecture, self.values, self.config = architecture, values, {}
        self._is_tied, self._factors = tie_embeddings, frequency_factors
        self.vocab_size = vocab_size
        self.hidden_size = values.count("embedding_length", WIDTH)
        self.num_heads = values.count("attention.head_count", HEADS)
        self.head_dim = values.count("attention.key_length", HEAD_DIM, max(1, self.hidden_size // self.num_heads))
        # `block_count` includes the layers of multi-token prediction, which are the last ones
        self.num_layers = max(
            1, values.count("block_count", LAYERS) - values.count("nextn_predict_layers", LAYERS, 0, least=0)
        )
        self.num_kv_heads = values.count("attention.head_count_kv", HEADS, self.num_heads)
        self.rms_eps = values.number("attention.layer_norm_rms_epsilon", 0.0, 1.0)
        self.max_position = values.count("context_length", POSITIONS)

    def dense(self, activation: Activation = "silu") -> DenseFeedForward:
        return DenseFeedForward(self.values.count("feed_forward_length", WIDTH), activation)

    def key(self, name: str) -> str:
        return _GGUF_KEYS[name]

    def has_qk_norm(self) -> bool:
        return "blk.0.attn_q_norm.weight" in self._names

    def has_attention_bias(self) -> bool:
        return "blk.0.attn_q.bias" in self._names

    def experts(
        self, activation: Activation = "silu", normalizes: bool = True, has_bias: bool = False
    ) -> RoutedExperts:
        return RoutedExperts(
            self.values.count("expert_count", EXPERTS),
            self.values.count("expert_used_count", EXPERTS),
            self.values.count("expert_feed_forward_length", WIDTH),
            activation,
            normalizes,
            has_bias,
        )

    def rotary(self, default_theta: float = 10000.0) -> Rotary:
        if self._num_rotated(self.head_dim) != self.head_dim:
            raise UnsupportedModel(
                "rotary embeddings over a part of the head (rope.dimension_count) are not supported in this architecture"
            )
        return Rotary(self.head_dim, *self._rope(default_theta))

    def partial_rotary(self, default_share: float) -> Rotary:
        return Rotary(self.head_dim, *self._rope(10000.0), self._num_rotated(int(self.head_dim * default_share)))

    def original_positions(self) -> int:
        return self.values.count("rope.scaling.original_context_length", POSITIONS, self.max_position)

    def local_theta(self) -> float:
        return self.values.number("rope.freq_base_swa", 1.0, 1e12, 10000.0)

    def query_scale(self) -> QueryScale | None:
        beta = self.values.number("attention.temperature_scale", 0.0, 1e3, 0.0)
        return QueryScale(beta, self.original_positions()) if beta else None

    def _num_rotated(self, default: int) -> int:
        return self.values.count("rope.dimension_count", HEAD_DIM, default)

    def _rope(self, default_theta: float) -> tuple[float, RopeScaling | None]:
        theta = self.values.number("rope.freq_base", 1.0, 1e12, default_theta)
        if self._factors is None:
            return theta, scaling_from_gguf(self.values)
        return theta, FrequencyFactors(self._factors, self.values.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0))

    def has_window(self) -> bool:
        return "attention.sliding_window" in self.values

    def window(self, default: int | None = None) -> int:
        return self.values.count("attention.sliding_window", POSITIONS, default)

    def full_layers(self) -> tuple[int, ...]:
        """Layers without a window, from `attention.sliding_window_pattern`."""
        has_window = self.values.array("attention.sliding_window_pattern", bool, self.num_layers)
        return tuple(number for number, windowed in enumerate(has_window) if not windowed)

    def chosen_windows(self, windows: Windows | None) -> Windows:
        """The window of the header in all layers, unless the family says which layers have it."""
        if windows is None and self.has_window():
            return [self.window()] * self.num_layers
        return super().chosen_windows(windows)

    def ties(self, default: bool) -> bool:
        return self._is_tied
