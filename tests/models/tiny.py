"""Tiny random transformers models of every supported family. A new family is one row of `FAMILIES`."""

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from paceline.models.families.read import read_config
from paceline.models.families.registry import families, family_of
from paceline.models.families.spec import DecoderSpec

_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def _partial(share: float) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}


_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_FACTORS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.4,
    "logits_scaling": 8.0,
}
_SCORED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
_LAYER_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama-tied": lambda: LlamaConfig(**_SHAPE | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama3-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "linear-rope": lambda: LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral-window": lambda: MistralConfig(**_SHAPE, sliding_window=8, head_dim=32),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=None, head_dim=16),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=32),
    "qwen2-mixed-window": lambda: Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=8, layer_types=_LAYER_KINDS, rope_parameters=_YARN
    ),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=32, norm_topk_prob=True),
    "qwen3-moe-plain-weights": lambda: Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, norm_topk_prob=False),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE | {"tie_word_embeddings": True},
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_SHAPE | {"tie_word_embeddings": True},
        head_dim=32,
        sliding_window=8,
        query_pre_attn_scalar=24,
        layer_types=_LAYER_KINDS,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmo2": lambda: Olmo2Config(**_SHAPE, pad_token_id=0),
    "olmo3": lambda: Olmo3Config(
        **_SHAPE,
        pad_token_id=0,
        sliding_window=8,
        layer_types=_LAYER_KINDS,
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "ministral3": lambda: Ministral3Config(
        **_SHAPE,
        head_dim=32,
        pad_token_id=0,
        rope_parameters=_YARN
        | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    ),
    "granite": lambda: GraniteConfig(**_SHAPE, **_FACTORS),
    "granite4": lambda: GraniteMoeHybridConfig(
        **_SHAPE,
        **_FACTORS,
        shared_intermediate_size=96,
        num_local_experts=0,
        layer_types=["attention"] * 3,
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_SHAPE | {"tie_word_embeddings": True},
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        final_logit_softcapping=2.0,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "gpt-oss": lambda: GptOssConfig(
        **_SHAPE,
        head_dim=32,
        num_local_experts=8,
        num_experts_per_tok=3,
        sliding_window=8,
        rope_parameters=_YARN | {"truncate": False},
    ),
    "mixtral": lambda: MixtralConfig(**_SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "smollm3": lambda: SmolLM3Config(**_SHAPE, pad_token_id=0, no_rope_layer_interval=2),
    "phi3": lambda: Phi3Config(**_SHAPE, pad_token_id=0, rope_parameters=_partial(0.75)),
    "phi3-longrope": lambda: Phi3Config(
        **_SHAPE,
        pad_token_id=0,
        original_max_position_embeddings=256,
        rope_parameters=_partial(0.5)
        | {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 3.0, 5.0, 9.0]},
    ),
    "glm4": lambda: Glm4Config(
        **_SHAPE, head_dim=32, attention_bias=True, pad_token_id=0, rope_parameters=_partial(0.5)
    ),
    "glm4-moe": lambda: Glm4MoeConfig(
        **_SHAPE,
        **_SCORED_EXPERTS,
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        pad_token_id=0,
        rope_parameters=_partial(0.5),
    ),
    "deepseek-v2": lambda: DeepseekV2Config(
        **_SHAPE | _SCORED_EXPERTS | _LATENT | {"q_lora_rank": None, "num_key_value_heads": 4}, topk_method="greedy"
    ),
    "deepseek-v2-groups": lambda: DeepseekV2Config(
        **_SHAPE | _SCORED_EXPERTS | _LATENT | {"num_key_value_heads": 4},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
    ),
    "deepseek-v3": lambda: DeepseekV3Config(
        **_SHAPE | _SCORED_EXPERTS | _LATENT | {"num_key_value_heads": 4},
        n_group=4,
        topk_group=2,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **_SHAPE | _SCORED_EXPERTS | _LATENT | {"num_key_value_heads": 4, "v_head_dim": 48}
    ),
}
ROW_OF = {
    name: next((row for row, config in FAMILIES.items() if config().model_type == name), None) for name in families()
}
"""The first row of each supported family. None if it has no row, which `test_config.py` refuses."""


def spec(row: str) -> DecoderSpec:
    return read_config(FAMILIES[row]().to_dict())


def uncounted_weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Weights that transformers does not count as parameters."""
    kinds = "e_score_correction_bias", "layer_scalar"
    return [(name, weight) for name, weight in model.named_buffers() if name.endswith(kinds)]


def build(family: str, **changes: object) -> PreTrainedModel:
    """A model in float32 whose weights are all random: norms of one and biases of zero would hide errors. `changes` replace
    values of its configuration."""
    has_shifted_norms = family_of(spec(family)).stored.norms == "w - 1"
    torch.manual_seed(0)
    config = FAMILIES[family]()
    config = type(config)(**config.to_dict() | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in (*model.named_parameters(), *uncounted_weights(model)):
            if weight.dim() == 1:
                is_centred = name.endswith(("bias", "sinks")) or has_shifted_norms
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if is_centred else 1.0))
            else:
                weight.copy_(torch.randn_like(weight) * 0.08)
    return model.eval()
