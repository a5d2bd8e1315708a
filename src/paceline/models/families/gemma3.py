"""Gemma 3, text only: windows in most layers, two rotary embeddings, four norms per layer, gelu, a scaled embedding."""

from paceline.core.errors import UnsupportedModel
from paceline.models.families.fields import LAYERS, Fields
from paceline.models.families.layers import Rotary
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.rope import rope_from_hf
from paceline.models.families.spec import DecoderSpec

_PERIOD = 6
"""Every sixth layer has no window."""


@family("gemma3_text", stored=StoredForm(norms="w - 1"))
def gemma3(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_activation", "gelu_pytorch_tanh", "an activation other than gelu_pytorch_tanh"),
        ("attention_bias", False, "an attention bias"),
        ("attn_logit_softcapping", None, "a soft cap of attention scores"),
        ("final_logit_softcapping", None, "a soft cap of logits"),
        ("use_bidirectional_attention", False, "bidirectional attention"),
    )
    values = fields.values
    rotary = _rotary(fields)
    pattern = "sliding_window_pattern" if "sliding_window_pattern" in values else "_sliding_window_pattern"
    period = values.count(pattern, LAYERS, _PERIOD)
    return fields.decoder(
        fields.heads(has_qk_norm=True, score_scale=values.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) ** -0.5),
        fields.dense("gelu_tanh"),
        fields.windows(range(period - 1, fields.num_layers, period), default=4096),
        rotary,
        norms="pre_and_post",
        embedding_scale=fields.hidden_size**0.5,
        ties_by_default=True,
    )


def _rotary(fields: Fields) -> tuple[Rotary, Rotary]:
    """That of the layers without a window, and that of the layers with one, which has no scaling."""
    rope = fields.values.section("rope_parameters")
    kinds = ("full_attention", "sliding_attention")
    if not any(kind in rope for kind in kinds):
        return fields.rotary(1e6), Rotary(fields.head_dim, fields.values.number("rope_local_base_freq", 1.0, 1e12, 1e4))
    full, local = (
        Rotary(fields.head_dim, *rope_from_hf({"rope_parameters": rope.raw(kind) or {}}, default))
        for kind, default in zip(kinds, (1e6, 1e4), strict=True)
    )
    if local.scaling is not None:
        raise UnsupportedModel("config.json has a rope scaling of the layers with a sliding window")
    return full, local
