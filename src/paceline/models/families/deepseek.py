"""DeepSeek V2 and V3, and GLM-4.7-Flash: attention through compressed states, and experts with a shared one.

The cache has the keys and values of all heads, which take many times the memory of the compressed states.
"""

from dataclasses import replace

from paceline.models.families.fields import HEAD_DIM, WIDTH, Fields
from paceline.models.families.layers import Heads, Latent, Rotary, RoutedExperts
from paceline.models.families.registry import StoredForm, family
from paceline.models.families.rope import rope_from_hf, yarn_score_factor
from paceline.models.families.spec import DecoderSpec

_STORED = StoredForm(has_adjacent_pairs=True)
_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@family("deepseek_v2", stored=_STORED, defaults=_SIZES | {"first_k_dense_replace": 0, "n_shared_experts": 2})
def deepseek_v2(fields: Fields) -> DecoderSpec:
    """Experts have the softmax of all logits as weights, whatever `norm_topk_prob` says, as in transformers."""
    fields.require(
        ("scoring_func", "softmax", "a router without softmax"), ("mlp_bias", False, "a bias in the experts")
    )
    experts = replace(fields.scored_experts(), scoring="softmax", has_choice_bias=False, normalizes=False)
    if fields.values.text("topk_method", "greedy") == "greedy":
        experts = replace(experts, num_groups=1, kept_groups=1)
    return _decoder(fields, experts)


@family("deepseek_v3", stored=_STORED, defaults=_SIZES | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4})
def deepseek_v3(fields: Fields) -> DecoderSpec:
    fields.require(
        ("scoring_func", "sigmoid", "a router without sigmoids"),
        ("topk_method", "noaux_tc", "another choice of experts"),
    )
    return _decoder(fields, fields.scored_experts())


@family("glm4_moe_lite", stored=_STORED, defaults={"rms_norm_eps": 1e-5})
def glm4_moe_lite(fields: Fields) -> DecoderSpec:
    return _decoder(fields, fields.scored_experts())


def _decoder(fields: Fields, experts: RoutedExperts) -> DecoderSpec:
    fields.require(
        ("hidden_act", "silu", "an activation other than silu"),
        ("attention_bias", False, "an attention bias"),
        ("rope_interleave", True, "rotary pairs that are not adjacent"),
        ("moe_layer_freq", 1, "a dense feed-forward layer among layers of experts"),
    )
    values = fields.values
    rotated, kept = values.count("qk_rope_head_dim", HEAD_DIM), values.count("qk_nope_head_dim", HEAD_DIM)
    query_rank = values.count("q_lora_rank", WIDTH) if "q_lora_rank" in values else None
    latent = Latent(query_rank, values.count("kv_lora_rank", WIDTH), rotated, values.count("v_head_dim", HEAD_DIM))
    size = rotated + kept
    scale = size**-0.5 * yarn_score_factor(fields.config)
    num_dense = fields.num_dense_layers()
    return fields.decoder(
        Heads(fields.num_heads, fields.num_heads, size, scale, latent=latent),
        [fields.dense() if number < num_dense else experts for number in range(fields.num_layers)],
        rotary=(Rotary(size, *rope_from_hf(fields.config), rotated),),
    )
