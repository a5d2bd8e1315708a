"""GLM-4, dense: biases on q, k and v, norms before and after each part, a rotary embedding of half of the head."""

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
