"""A model's description as one flat object: the form in which it is sent with weights, and a short way to write one down."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.formats.activation import Activation
from paceline.kernels.rope import FrequencyFactors, LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from paceline.models.families.fields import EXPERTS, LAYERS
from paceline.models.families.layers import DenseFeedForward, FeedForward, Heads, Rotary, RoutedExperts, make_layers
from paceline.models.families.spec import DecoderSpec

_SCALINGS = {kind.__name__: kind for kind in (LinearScaling, Llama3Scaling, FrequencyFactors, YarnScaling)}


def flat_spec(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_size: int,
    rms_eps: float,
    rope_theta: float,
    max_position: int,
    rope_scaling: RopeScaling | None = None,
    tie_embeddings: bool = False,
    attention_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
    full_layers: tuple[int, ...] = (),
    local_rope_theta: float | None = None,
    attention_scale: float | None = None,
    has_sinks: bool = False,
    has_output_norms: bool = False,
    embedding_scale: float = 1.0,
    activation: Activation = "silu",
    output_bias: bool = False,
    num_experts: int = 0,
    experts_per_token: int = 0,
    normalizes_experts: bool = True,
    bos_id: int | None = None,
    eos_ids: tuple[int, ...] = (),
) -> DecoderSpec:
    """A model whose layers are alike but for their window, which `full_layers` do not have. Layers with a window use
    `local_rope_theta` without scaling, unless it is None. `output_bias` is that of attention, the router and the experts."""
    heads = Heads(num_heads, num_kv_heads, head_dim, attention_scale, attention_bias, output_bias, qk_norm, has_sinks)
    ffn: FeedForward = DenseFeedForward(ffn_size, activation)
    if num_experts:
        ffn = RoutedExperts(num_experts, experts_per_token, ffn_size, activation, normalizes_experts, output_bias)
    rotary = [Rotary(head_dim, rope_theta, rope_scaling)]
    if local_rope_theta is not None:
        rotary.append(Rotary(head_dim, local_rope_theta))
    windows = [None if number in full_layers else sliding_window for number in range(num_layers)]
    return DecoderSpec(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        rms_eps=rms_eps,
        max_position=max_position,
        rotary=tuple(rotary),
        layers=make_layers(heads, ffn, "pre_and_post" if has_output_norms else "pre", windows, len(rotary)),
        tie_embeddings=tie_embeddings,
        embedding_scale=embedding_scale,
        bos_id=bos_id,
        eos_ids=eos_ids,
    )


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


def config_to_json(spec: DecoderSpec) -> str:
    values = flat_fields(spec)
    scaling: RopeScaling | None = values["rope_scaling"]
    if scaling is not None:
        values["rope_scaling"] = {**asdict(scaling), "kind": type(scaling).__name__}
    return json.dumps(values)


def config_from_json(text: str) -> DecoderSpec:
    try:
        values = json.loads(text)
        scaling: Mapping[str, object] | None = values.pop("rope_scaling")
        if scaling is not None:
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in scaling.items()}
            values["rope_scaling"] = _SCALINGS[str(given.pop("kind"))](**given)  # type: ignore[arg-type]
        values |= {name: tuple(values[name]) for name in ("eos_ids", "full_layers")}
        if not (1 <= values["num_layers"] <= LAYERS and 0 <= values["num_experts"] <= EXPERTS):
            raise ValueError(f"{values['num_layers']} layers of {values['num_experts']} experts")
        return flat_spec(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModel(f"the model configuration cannot be read: {error!r}") from None
