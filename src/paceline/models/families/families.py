"""What each supported family reads from its config.json in addition to the sizes that all families share.

    llama, mistral, qwen2, qwen3   one dense feed-forward layer of silu(gate) * up
    qwen3_moe                      Qwen3 with routed experts
    gemma3_text                    windows in most layers, two rotary tables, four norms per layer, gelu, scaled embedding
    gpt_oss                        routed experts with biases, attention sinks, a window in every other layer, YaRN

Options that the forward pass does not support are rejected by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from paceline.model_files import Metadata
from paceline.models.families.rope import rope_from_hf

Options = dict[str, Any]
"""Arguments of `ModelConfig` by name."""

_WIDTH, _LAYERS, _EXPERTS, _POSITIONS = 1 << 20, 4096, 4096, 1 << 24
_GEMMA_PERIOD = 6
"""Every sixth layer of Gemma 3 has no window."""


def family_options(architecture: str, fields: Metadata, config: Mapping[str, Any]) -> Options:
    """Options of one of `ARCHITECTURES`. Raises `UnsupportedModel` for a value that is not supported."""
    return _FAMILIES[architecture](architecture, fields, config)


def _llama(architecture: str, fields: Metadata, config: Mapping[str, Any]) -> Options:
    _require(
        config,
        ("hidden_act", "silu", "an activation other than silu"),
        ("mlp_bias", False, "a bias in the feed-forward layers"),
        ("attention_bias", architecture == "qwen2", "an attention bias outside Qwen2"),
        ("partial_rotary_factor", 1.0, "a rotary embedding over a part of the head"),
        ("num_local_experts", None, "a mixture of experts in this family"),
    )
    theta, scaling = rope_from_hf(config)
    return {
        "ffn_size": fields.count("intermediate_size", _WIDTH),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": architecture == "qwen2",
        "qk_norm": architecture in ("qwen3", "qwen3_moe"),
        **_windows(architecture, fields),
    }


def _qwen3_moe(architecture: str, fields: Metadata, config: Mapping[str, Any]) -> Options:
    experts = "num_experts" if "num_experts" in fields else "num_local_experts"
    _require(
        config,
        ("mlp_only_layers", [], "a dense feed-forward layer among layers of experts"),
        ("decoder_sparse_step", 1, "a dense feed-forward layer among layers of experts"),
    )
    dense = {name: value for name, value in config.items() if name != "num_local_experts"}
    return _llama(architecture, fields, dense) | {
        "ffn_size": fields.count("moe_intermediate_size", _WIDTH),
        "num_experts": fields.count(experts, _EXPERTS),
        "experts_per_token": fields.count("num_experts_per_tok", _EXPERTS),
        "normalizes_experts": fields.flag("norm_topk_prob", False),
    }


def _gemma3(architecture: str, fields: Metadata, config: Mapping[str, Any]) -> Options:
    _require(
        config,
        ("hidden_activation", "gelu_pytorch_tanh", "an activation other than gelu_pytorch_tanh"),
        ("attention_bias", False, "an attention bias"),
        ("attn_logit_softcapping", None, "a soft cap of attention scores"),
        ("final_logit_softcapping", None, "a soft cap of logits"),
        ("use_bidirectional_attention", False, "bidirectional attention"),
    )
    rope = fields.section("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if any(kind in rope for kind in kinds):
        (theta, scaling), (local, local_scaling) = (
            rope_from_hf({"rope_parameters": rope.raw(kind) or {}}, default)
            for kind, default in zip(kinds, (1e6, 1e4), strict=True)
        )
        if local_scaling is not None:
            raise UnsupportedModel("config.json has a rope scaling of the layers with a sliding window")
    else:
        theta, scaling = rope_from_hf(config, 1e6)
        local = fields.number("rope_local_base_freq", 1.0, 1e12, 1e4)
    pattern = "sliding_window_pattern" if "sliding_window_pattern" in fields else "_sliding_window_pattern"
    period, layers = fields.count(pattern, _LAYERS, _GEMMA_PERIOD), fields.count("num_hidden_layers", _LAYERS)
    full = tuple(range(period - 1, layers, period))
    return {
        "ffn_size": fields.count("intermediate_size", _WIDTH),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_theta": local,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
        "qk_norm": True,
        "sliding_window": fields.count("sliding_window", _POSITIONS, 4096),
        "full_layers": _full_layers(fields) if fields.raw("layer_types") else full,
        "attention_scale": fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) ** -0.5,
        "has_output_norms": True,
        "embedding_scale": fields.count("hidden_size", _WIDTH) ** 0.5,
        "activation": "gelu_tanh",
    }


def _gpt_oss(architecture: str, fields: Metadata, config: Mapping[str, Any]) -> Options:
    _require(
        config,
        ("hidden_act", "silu", "an activation other than silu"),
        ("attention_bias", True, "attention without biases"),
        ("swiglu_alpha", SWIGLU_ALPHA, "another gain of the activation"),
        ("swiglu_limit", SWIGLU_LIMIT, "another limit of the activation"),
    )
    theta, scaling = rope_from_hf(config, 150000.0)
    layers = fields.count("num_hidden_layers", _LAYERS)
    return {
        "ffn_size": fields.count("intermediate_size", _WIDTH),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_bias": True,
        "output_bias": True,
        "sliding_window": fields.count("sliding_window", _POSITIONS, 128),
        "full_layers": _full_layers(fields) if fields.raw("layer_types") else tuple(range(1, layers, 2)),
        "has_sinks": True,
        "activation": "clamped_swiglu",
        "num_experts": fields.count("num_local_experts", _EXPERTS),
        "experts_per_token": fields.count("num_experts_per_tok", _EXPERTS, 4),
    }


_FAMILIES: dict[str, Callable[[str, Metadata, Mapping[str, Any]], Options]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
}
ARCHITECTURES = tuple(_FAMILIES)
"""Supported architectures, by their `model_type` in config.json."""


def _require(config: Mapping[str, Any], *options: tuple[str, object, str]) -> None:
    """Raise `UnsupportedModel` for an option (key, supported value, meaning of other values) with another value."""
    for key, expected, meaning in options:
        found = config.get(key)
        if found is not None and found != expected:
            raise UnsupportedModel(f"config.json has {key}={found!r:.80}: {meaning} is not supported")


def _windows(architecture: str, fields: Metadata) -> Options:
    if architecture == "llama" or "sliding_window" not in fields:
        return {}
    window = fields.count("sliding_window", _POSITIONS)
    if architecture == "mistral":
        return {"sliding_window": window}
    if not fields.flag("use_sliding_window", False):
        return {}
    # Qwen uses the window from layer `max_window_layers` on; `layer_types` lists it per layer.
    layers = fields.count("num_hidden_layers", _LAYERS)
    first = min(layers, fields.count("max_window_layers", _LAYERS, 0, least=0))
    full = _full_layers(fields) if fields.raw("layer_types") else tuple(range(first))
    return {} if len(full) == layers else {"sliding_window": window, "full_layers": full}


def _full_layers(fields: Metadata) -> tuple[int, ...]:
    """Layers without a window, from `layer_types`."""
    kinds = fields.array("layer_types", str, fields.count("num_hidden_layers", _LAYERS))
    unknown = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"config.json has layers of the type {unknown[0][:60]!r}, which is not supported")
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
