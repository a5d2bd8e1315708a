"""Granite 3 and 4, dense: Llama with factors of embedding, residuals, scores and logits."""

from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.models.families.fields import WIDTH, Fields
from paceline.models.families.layers import DenseFeedForward, Rotary
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec

_FACTORS = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0)
_FUSED = StoredForm(
    is_fused=True,
    renamed=((".mlp.gate_up_proj.", ".shared_mlp.input_linear."), (".mlp.down_proj.", ".shared_mlp.output_linear.")),
)
_ATTENTION = {"attention", "full_attention"}


@family("granite", gguf="granite", has_adjacent_pairs=True, defaults=_FACTORS)
def granite(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    return _granite(fields, fields.dense())


@family("granitemoehybrid", stored=_FUSED, defaults=_FACTORS | {"num_local_experts": 8})
def granite4(fields: Fields) -> DecoderSpec:
    """The sizes of Granite 4 whose layers are all attention and a dense feed-forward layer."""
    if not set(fields.layer_types()) <= _ATTENTION:
        raise UnsupportedModel(
            "config.json has layer_types with Mamba layers, which are not supported: use a size of Granite 4 without them"
        )
    fields.require(
        ("num_local_experts", 0, "a mixture of experts in this family"),
        ("attention_bias", False, "an attention bias"),
        ("hidden_act", "silu", "an activation other than silu"),
    )
    turns = fields.values.text("position_embedding_type", "nope") == "rope"
    rotary = fields.rotary() if turns else Rotary(fields.head_dim, 1.0, num_rotated=0)
    return _granite(fields, DenseFeedForward(fields.values.count("shared_intermediate_size", WIDTH)), rotary=(rotary,))


def _granite(fields: Fields, ffn: DenseFeedForward, **options: Any) -> DecoderSpec:
    return fields.decoder(
        fields.heads(score_scale=fields.factor("attention_multiplier", fields.head_dim**-0.5)),
        ffn,
        embedding_scale=fields.factor("embedding_multiplier"),
        residual_scale=fields.factor("residual_multiplier"),
        logit_scale=1 / fields.factor("logits_scaling"),
        **options,
    )
