"""Gemma 4 31B, text only: heads of two sizes, values that are keys in layers without a window, a scale of each layer."""

from dataclasses import replace

from paceline.core.errors import UnsupportedModel
from paceline.models.families.fields import HEAD_DIM, HEADS, Fields
from paceline.models.families.layers import Heads, OwnHeads, Rotary
from paceline.models.families.registry import family
from paceline.models.families.rope import rope_from_hf
from paceline.models.families.spec import DecoderSpec

_PERIOD = 6
"""Every sixth layer has no window if the file does not list them."""
_SMALL = "a size with {}, such as E2B and E4B,"

_DEFAULTS = {
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}


@family("gemma4_text", defaults=_DEFAULTS)
def gemma4(fields: Fields) -> DecoderSpec:
    fields.require(
        ("hidden_activation", "gelu_pytorch_tanh", "an activation other than gelu_pytorch_tanh"),
        ("attention_bias", False, "an attention bias"),
        ("use_bidirectional_attention", "vision", "bidirectional attention of text"),
        ("hidden_size_per_layer_input", 0, _SMALL.format("inputs for each layer")),
        ("num_kv_shared_layers", 0, _SMALL.format("layers that share keys and values")),
        ("enable_moe_block", False, "a size with experts, such as 26B-A4B,"),
    )
    windows = fields.windows(range(_PERIOD - 1, fields.num_layers, _PERIOD), default=512)
    each = [_own_heads(fields, number, window is None) for number, window in enumerate(windows)]
    size, num_kv = max(own.head_dim for own in each), max(own.num_kv for own in each)
    heads = [Heads(fields.num_heads, num_kv, size, 1.0, has_qk_norm=True, own=own) for own in each]
    spec = fields.decoder(
        heads,
        fields.dense("gelu_tanh"),
        windows,
        (_full_rotary(fields, size), _local_rotary(fields, size)),
        norms="pre_and_post",
        embedding_scale=fields.hidden_size**0.5,
        logit_cap=fields.cap("final_logit_softcapping"),
    )
    return replace(spec, layers=tuple(replace(layer, has_scale=True) for layer in spec.layers))


def _own_heads(fields: Fields, number: int, is_full: bool) -> OwnHeads:
    """transformers 5.22 writes the sizes of each layer, and earlier ones those of the layers without a window."""
    values, shares = fields.values, fields.values.flag("attention_k_eq_v", False)
    own = values.section("per_layer_config").section(str(number))
    num_kv, head_dim = fields.num_kv_heads, fields.head_dim
    if is_full and "per_layer_config" not in values:
        head_dim = values.count("global_head_dim", HEAD_DIM)
        num_kv = values.count("num_global_key_value_heads", HEADS, num_kv) if shares else num_kv
    num_kv, head_dim = own.count("num_key_value_heads", HEADS, num_kv), own.count("head_dim", HEAD_DIM, head_dim)
    return OwnHeads(num_kv, head_dim, has_values=not (is_full and shares))


def _full_rotary(fields: Fields, size: int) -> Rotary:
    """A share of the head turns, with the frequencies of a whole head."""
    rope = fields.values.section("rope_parameters").section("full_attention")
    if rope.text("rope_type", "proportional") != "proportional":
        raise UnsupportedModel(
            f"config.json has the rope_type {rope.raw('rope_type')!r:.60} in layers without a window"
        )
    share = rope.number("partial_rotary_factor", 0.0, 1.0, 0.25)
    return Rotary(
        size, rope.number("rope_theta", 1.0, 1e12, 1e6), None, int(share * size // 2) * 2, exponent_width=size
    )


def _local_rotary(fields: Fields, size: int) -> Rotary:
    rope = fields.values.section("rope_parameters").raw("sliding_attention") or {}
    return Rotary(size, *rope_from_hf({"rope_parameters": rope}), fields.head_dim)
