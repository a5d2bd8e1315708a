"""GLM-4, dense: biases on q, k and v, norms before and after each part, a rotary embedding of half of the head.

GLM-4.5 and 4.6 have experts in all but the first layers, chosen by sigmoids, and a norm before each part only. Their layers of
multi-token prediction are not loaded.
"""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec

_NAMES = (
    (".post_attention_layernorm.", ".post_self_attn_layernorm."),
    (".pre_feedforward_layernorm.", ".post_attention_layernorm."),
    (".post_feedforward_layernorm.", ".post_mlp_layernorm."),
)
_STORED = StoredForm(is_fused=True, has_adjacent_pairs=True, renamed=_NAMES)


@family("glm4", gguf="glm4", has_adjacent_pairs=True, stored=_STORED, defaults={"attention_bias": True})
def glm4(fields: Fields) -> DecoderSpec:
    fields.require_plain(has_attention_bias=True, has_partial_rotary=True)
    return fields.decoder(
        fields.heads(has_bias=True), fields.dense(), rotary=(fields.partial_rotary(0.5),), norms="pre_and_post"
    )


@family("glm4_moe", gguf="glm4moe", defaults={"attention_bias": True, "rms_norm_eps": 1e-5, "num_experts_per_tok": 8})
def glm4_moe(fields: Fields) -> DecoderSpec:
    fields.require(("hidden_act", "silu", "an activation other than silu"))
    num_dense = fields.num_dense_layers()
    experts, dense = fields.scored_experts(), fields.dense()
    return fields.decoder(
        fields.heads(has_bias=fields.has_attention_bias(), has_qk_norm=fields.has_qk_norm()),
        [dense if number < num_dense else experts for number in range(fields.num_layers)],
        rotary=(fields.partial_rotary(0.5),),
    )
