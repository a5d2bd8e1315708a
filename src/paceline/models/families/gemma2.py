"""Gemma 2: caps of scores and logits, a window in every other layer, four norms per layer, gelu, a scaled embedding."""

from paceline.models.families.fields import Fields
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.spec import DecoderSpec

_LAYERS_OF_27B = 46
"""The model with so many layers scales its scores by the width of a head as if all heads filled the hidden size."""

_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}


@family("gemma2", gguf="gemma2", stored=StoredForm(norms="w - 1"), defaults=_DEFAULTS)
def gemma2(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_activation", "gelu_pytorch_tanh", "an activation other than gelu_pytorch_tanh"),
        ("attention_bias", False, "an attention bias"),
        ("use_bidirectional_attention", False, "bidirectional attention"),
    )
    scaled_by = fields.hidden_size / fields.num_heads if fields.num_layers == _LAYERS_OF_27B else fields.head_dim
    return fields.decoder(
        fields.heads(
            score_scale=fields.values.number("query_pre_attn_scalar", 1e-3, 1e6, scaled_by) ** -0.5,
            score_cap=fields.cap("attn_logit_softcapping", 50.0),
        ),
        fields.dense("gelu_tanh"),
        fields.windows(range(1, fields.num_layers, 2), default=4096),
        norms="pre_and_post",
        embedding_scale=fields.hidden_size**0.5,
        logit_cap=fields.cap("final_logit_softcapping", 30.0),
    )
