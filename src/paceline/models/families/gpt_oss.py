"""gpt-oss: routed experts with biases, attention sinks, a window in every other layer, YaRN."""

from paceline.kernels.formats.activation import SWIGLU_ALPHA, SWIGLU_LIMIT
from paceline.models.families.fields import EXPERTS, WIDTH, Fields
from paceline.models.families.layers import RoutedExperts
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec


@family("gpt_oss", stored=StoredForm(experts="joined"))
def gpt_oss(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_act", "silu", "an activation other than silu"),
        ("attention_bias", True, "attention without biases"),
        ("swiglu_alpha", SWIGLU_ALPHA, "another gain of the activation"),
        ("swiglu_limit", SWIGLU_LIMIT, "another limit of the activation"),
    )
    values = fields.values
    experts = RoutedExperts(
        num=values.count("num_local_experts", EXPERTS),
        per_token=values.count("num_experts_per_tok", EXPERTS, 4),
        width=values.count("intermediate_size", WIDTH),
        activation="clamped_swiglu",
        has_bias=True,
    )
    return fields.decoder(
        fields.heads(has_bias=True, has_output_bias=True, has_sinks=True),
        experts,
        fields.windows(range(1, fields.num_layers, 2), default=128),
        (fields.rotary(150000.0),),
    )
