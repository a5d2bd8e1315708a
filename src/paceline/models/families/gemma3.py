"""Gemma 3, text only: windows in most layers, two rotary embeddings, four norms per layer, gelu, a scaled embedding."""

from paceline.models.families.fields import LAYERS, Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec

_PERIOD = 6
"""Every sixth layer has no window."""
_LAYERS_OF_27B = 62
"""The model with so many layers scales its scores by the width of a head as if all heads filled the hidden size."""

# The text_config of published checkpoints leaves these out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


@family("gemma3_text", gguf="gemma3", stored=StoredForm(norms="w - 1"), defaults=_DEFAULTS)
def gemma3(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_activation", "gelu_pytorch_tanh", "an activation other than gelu_pytorch_tanh"),
        ("attention_bias", False, "an attention bias"),
        ("use_bidirectional_attention", False, "bidirectional attention"),
    )
    values = fields.values
    pattern = "sliding_window_pattern" if "sliding_window_pattern" in values else "_sliding_window_pattern"
    period = values.count(pattern, LAYERS, _PERIOD)
    scaled_by = fields.hidden_size / fields.num_heads if fields.num_layers == _LAYERS_OF_27B else fields.head_dim
    return fields.decoder(
        fields.heads(
            has_qk_norm=True,
            score_scale=values.number("query_pre_attn_scalar", 1e-3, 1e6, scaled_by) ** -0.5,
            score_cap=fields.cap("attn_logit_softcapping"),
        ),
        fields.dense("gelu_tanh"),
        fields.windows(range(period - 1, fields.num_layers, period)),
        fields.rotary_by_window(1e6, fields.local_theta()),
        norms="pre_and_post",
        embedding_scale=fields.hidden_size**0.5,
        logit_cap=fields.cap("final_logit_softcapping"),
    )
