"""gpt-oss: routed experts with biases, attention sinks, a window in every other layer, YaRN."""

from paceline.kernels.formats.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from paceline.models.families.fields import Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec


@family("gpt_oss", stored=StoredForm(experts="joined"), defaults={"num_experts_per_tok": 4})
def gpt_oss(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_act", "silu", "an activation other than silu"),
        ("attention_bias", True, "attention without biases"),
        ("swiglu_alpha", SWIGLU_ALPHA, "another gain of the activation"),
        ("swiglu_limit", SWIGLU_LIMIT, "another limit of the activation"),
    )
    return fields.decoder(
        fields.heads(has_bias=True, has_output_bias=True, has_sinks=True),
        fields.experts("clamped_swiglu", has_bias=True),
        fields.windows(range(1, fields.num_layers, 2), default=128),
        (fields.rotary(150000.0),),
    )
