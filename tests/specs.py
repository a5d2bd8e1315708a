"""Descriptions of models for tests, changed by the names of `flat_spec`."""

from dataclasses import replace
from typing import Any

from paceline.kernels.rope import FrequencyFactors
from paceline.models.families.flat import flat_spec
from paceline.models.families.layers import Heads, RoutedExperts
from paceline.models.families.spec import DecoderSpec


def changed(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """A model like `spec` with other values of arguments of `flat_spec`."""
    return flat_spec(**flat_fields(spec) | changes)


def resized(spec: DecoderSpec, vocab_size: int, hidden_size: int, head_dim: int, ffn_size: int) -> DecoderSpec:
    """The same layers in other sizes."""
    layers = (
        replace(
            layer,
            attention=_resized_heads(layer.attention, head_dim),
            ffn=replace(layer.ffn, width=ffn_size),
        )
        for layer in spec.layers
    )
    rotary = (
        replace(
            turning,
            size=head_dim,
            num_rotated=None
            if turning.num_rotated is None
            else turning.num_rotated * head_dim // turning.size // 2 * 2,
            exponent_width=None if turning.exponent_width is None else head_dim,
            scaling=None if isinstance(turning.scaling, FrequencyFactors) else turning.scaling,
        )
        for turning in spec.rotary
    )
    return replace(spec, vocab_size=vocab_size, hidden_size=hidden_size, layers=tuple(layers), rotary=tuple(rotary))


def _resized_heads(heads: Heads, head_dim: int) -> Heads:
    latent = heads.latent
    if latent is not None:
        rotated = latent.num_rotated * head_dim // heads.head_dim // 2 * 2
        latent = replace(latent, num_rotated=rotated, value_dim=latent.value_dim * head_dim // heads.head_dim)
    own = heads.own
    if own is not None:
        own = replace(own, head_dim=own.head_dim * head_dim // heads.head_dim)
    return replace(heads, head_dim=head_dim, latent=latent, own=own)


def with_heads(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    """The same model with another attention in all layers."""
    return with_layers(spec, attention=replace(spec.heads, **changes))


def with_layers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def with_scored_experts(spec: DecoderSpec) -> DecoderSpec:
    """The same model with experts as in GLM-4.5 in all layers but the first."""
    experts = RoutedExperts(
        num=4, per_token=2, width=32, scoring="sigmoid", has_choice_bias=True, scale=1.5, shared_width=40
    )
    return replace(spec, layers=(spec.layers[0], *(replace(layer, ffn=experts) for layer in spec.layers[1:])))


def flat_fields(spec: DecoderSpec) -> dict[str, Any]:
    """The arguments of `flat_spec` that return `spec`."""
    heads, ffn, experts = spec.heads, spec.ffn, spec.experts
    return {
        "architecture": spec.architecture,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": heads.num,
        "num_kv_heads": heads.num_kv,
        "head_dim": heads.head_dim,
        "ffn_size": ffn.width,
        "rms_eps": spec.rms_eps,
        "rope_theta": spec.rotary[0].theta,
        "max_position": spec.max_position,
        "rope_scaling": spec.rotary[0].scaling,
        "tie_embeddings": spec.tie_embeddings,
        "attention_bias": heads.has_bias,
        "qk_norm": heads.has_qk_norm,
        "sliding_window": spec.sliding_window,
        "full_layers": spec.full_layers,
        "local_rope_theta": spec.rotary[1].theta if len(spec.rotary) > 1 else None,
        "attention_scale": heads.score_scale,
        "has_sinks": heads.has_sinks,
        "has_output_norms": spec.norms == "pre_and_post",
        "embedding_scale": spec.embedding_scale,
        "activation": ffn.activation,
        "output_bias": heads.has_output_bias,
        "num_experts": 0 if experts is None else experts.num,
        "experts_per_token": 0 if experts is None else experts.per_token,
        "normalizes_experts": experts is None or experts.normalizes,
        "bos_id": spec.bos_id,
        "eos_ids": spec.eos_ids,
    }
