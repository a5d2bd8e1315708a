"""Tiny random transformers models of every supported family."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

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
}


def build(family: str) -> PreTrainedModel:
    """A model in float32 whose weights are all random: norms of one and biases of zero would hide errors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            else:
                weight.copy_(torch.randn_like(weight) * 0.08)
    return model.eval()
