"""Reads the rotary embeddings of a model from its config.json or from the fields of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from paceline.model_files import Metadata


def rope_from_hf(config: Mapping[str, Any], default_theta: float = 10000.0) -> tuple[float, RopeScaling | None]:
    """Returns (theta, scaling). transformers 5 stores them in `rope_parameters`, transformers 4 in two keys."""
    fields = Metadata("config.json", config)
    rope = fields.section("rope_parameters" if fields.raw("rope_parameters") else "rope_scaling")
    theta = rope.number("rope_theta", 1.0, 1e12, fields.number("rope_theta", 1.0, 1e12, default_theta))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(_factor(rope, "factor"))
    if kind == "llama3":
        low, high = _factor(rope, "low_freq_factor"), _factor(rope, "high_freq_factor")
        if low >= high:
            raise UnsupportedModel(f"config.json has low_freq_factor={low} and high_freq_factor={high}: expected less")
        positions = rope.count("original_max_position_embeddings", 1 << 24)
        return theta, Llama3Scaling(_factor(rope, "factor"), low, high, positions)
    if kind in ("longrope", "su") or "short_factor" in rope:  # early configurations of Phi-3 call it su or yarn
        return theta, _longrope(rope, fields)
    if kind == "yarn":
        return theta, _yarn(rope, fields)
    raise UnsupportedModel(f"rope scaling {kind[:60]!r} is not supported; supported: linear, llama3, longrope, yarn")


def _longrope(rope: Metadata, fields: Metadata) -> FrequencyFactors:
    """The factors of texts that are no longer than the original context."""
    longest = fields.count("max_position_embeddings", 1 << 24, 2048)
    original = rope.count(
        "original_max_position_embeddings", longest, fields.count("original_max_position_embeddings", 1 << 24, longest)
    )
    magnitude = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original > 1 else 1.0
    factors = tuple(float(factor) for factor in rope.array("short_factor", (int, float)))
    if not all(1e-3 <= factor <= 1e6 for factor in factors):
        raise UnsupportedModel("config.json has a short_factor that is not between 0.001 and 1,000,000")
    return FrequencyFactors(factors, rope.number("attention_factor", 1e-3, 1e3, magnitude))


def _yarn(rope: Metadata, fields: Metadata) -> YarnScaling:
    factor = _factor(rope, "factor")
    magnitude = _yarn_magnitude(factor)
    if "mscale" in rope and "mscale_all_dim" in rope:
        scales = rope.number("mscale", 0.0, 1e3), rope.number("mscale_all_dim", 0.0, 1e3)
        if all(scales):
            magnitude = _yarn_magnitude(factor, scales[0]) / _yarn_magnitude(factor, scales[1])
    longest = fields.count("max_position_embeddings", 1 << 24, 2048)
    return YarnScaling(
        factor,
        beta_fast=rope.number("beta_fast", 1e-3, 1e6, 32.0),
        beta_slow=rope.number("beta_slow", 1e-3, 1e6, 1.0),
        original_max_position=rope.count("original_max_position_embeddings", 1 << 24, longest),
        magnitude=rope.number("attention_factor", 1e-3, 1e3, magnitude),
        is_truncated=rope.flag("truncate", True),
    )


def yarn_score_factor(config: Mapping[str, Any]) -> float:
    """Factor of the scores of latent attention: what cosines and sines are not multiplied by, once for queries and once for
    keys."""
    fields = Metadata("config.json", config)
    rope = fields.section("rope_parameters" if fields.raw("rope_parameters") else "rope_scaling")
    all_dims = rope.number("mscale_all_dim", 0.0, 1e3, 0.0)
    return _yarn_magnitude(_factor(rope, "factor"), all_dims) ** 2 if all_dims else 1.0


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def scaling_from_gguf(fields: Metadata) -> RopeScaling | None:
    """Scaling in GGUF fields, whose architecture prefix was removed."""
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(_factor(fields, "rope.scaling.factor"))
    if kind == "yarn":
        factor, all_dims = _factor(fields, "rope.scaling.factor"), "rope.scaling.yarn_log_multiplier"
        magnitude = _yarn_magnitude(factor)
        if all_dims in fields:
            magnitude /= _yarn_magnitude(factor, fields.number(all_dims, 0.0, 1e3))
        return YarnScaling(
            factor,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
            original_max_position=fields.count(
                "rope.scaling.original_context_length", 1 << 24, fields.count("context_length", 1 << 24)
            ),
            magnitude=fields.number("rope.scaling.attn_factor", 1e-3, 1e3, magnitude),
        )
    raise UnsupportedModel(f"rope scaling {kind[:60]!r} in a GGUF is not supported; supported: linear, yarn")


def _factor(fields: Metadata, name: str) -> float:
    return fields.number(name, 1e-3, 1e6)
