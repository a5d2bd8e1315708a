"""Qwen2 has biases on q, k and v. Qwen3 has norms of the heads of q and k instead, and Qwen3-MoE has routed experts."""

from paceline.models.families.fields import LAYERS, Fields
from paceline.models.families.layers import Windows
from paceline.models.families.registry import family
from paceline.models.families.spec import DecoderSpec


@family("qwen2", gguf="qwen2")
def qwen2(fields: Fields) -> DecoderSpec:
    fields.require_plain(has_attention_bias=True)
    return fields.decoder(fields.heads(has_bias=True), fields.dense(), _windows(fields))


@family("qwen3", gguf="qwen3")
def qwen3(fields: Fields) -> DecoderSpec:
    fields.require_plain()
    return fields.decoder(fields.heads(has_qk_norm=True), fields.dense(), _windows(fields))


@family("qwen3_moe", gguf="qwen3moe", defaults={"norm_topk_prob": False})
def qwen3_moe(fields: Fields) -> DecoderSpec:
    fields.require(
        ("mlp_only_layers", [], "a dense feed-forward layer among layers of experts"),
        ("decoder_sparse_step", 1, "a dense feed-forward layer among layers of experts"),
    )
    fields.require_plain(has_experts=True)
    experts = fields.experts(normalizes=fields.values.flag("norm_topk_prob", True))  # llama.cpp always does
    return fields.decoder(fields.heads(has_qk_norm=True), experts, _windows(fields))


def _windows(fields: Fields) -> Windows | None:
    """The window is used from layer `max_window_layers` on, or in the layers that `layer_types` lists."""
    if "sliding_window" not in fields.values:
        return None
    fields.window()  # checked even if it is not used
    if not fields.values.flag("use_sliding_window", False):
        return None
    first = min(fields.num_layers, fields.values.count("max_window_layers", LAYERS, 0, least=0))
    return fields.windows(range(first))
