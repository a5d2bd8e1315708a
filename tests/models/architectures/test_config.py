import pytest

from paceline.core.errors import UnsupportedModel
from paceline.models.architectures.config import ModelConfig
from paceline.models.architectures.rope import FrequencyFactors, LinearScaling, Llama3Scaling

HF = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
GGUF = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 24,
    "qwen2.context_length": 32768,
    "qwen2.embedding_length": 896,
    "qwen2.feed_forward_length": 4864,
    "qwen2.attention.head_count": 14,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.rope.freq_base": 1000000.0,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "tokenizer.ggml.eos_token_id": 151645,
}


def test_llama_3_8b() -> None:
    config = ModelConfig.from_hf(HF)
    assert config.head_dim == 128
    assert config.eos_ids == (128001, 128008, 128009)
    assert config.num_parameters == 8_030_261_248  # as published
    assert config.kv_bytes_per_token(2) == 131072
    assert config.rope_scaling is None
    assert config.sliding_window is None


def test_rope_is_read_from_both_formats_of_transformers() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = ModelConfig.from_hf(HF | {"rope_scaling": llama3 | {"rope_type": "llama3"}})
    new = {k: v for k, v in HF.items() if k != "rope_theta"}
    new = ModelConfig.from_hf(new | {"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 500000.0}})
    assert old == new
    assert old.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert ModelConfig.from_hf(HF | {"rope_scaling": {"type": "linear", "factor": 2}}).rope_scaling == LinearScaling(
        2.0
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 5}, "5 key-value heads"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 8},
            "sliding window",
        ),
    ],
)
def test_unsupported_features_are_rejected_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hf(HF | change)


def test_an_unknown_architecture_is_rejected_first() -> None:
    with pytest.raises(UnsupportedModel, match=r"'gemma3'.*llama, mistral, qwen2, qwen3"):
        ModelConfig.from_hf({"model_type": "gemma3", "text_config": {}})
    with pytest.raises(UnsupportedModel, match="unknown"):
        ModelConfig.from_hf({})


def test_sliding_windows() -> None:
    assert ModelConfig.from_hf(HF | {"model_type": "mistral", "sliding_window": 4096}).sliding_window == 4096
    qwen = HF | {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 0}
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": False}).sliding_window is None
    assert ModelConfig.from_hf(qwen | {"use_sliding_window": True}).sliding_window == 4096


def test_gguf_metadata() -> None:
    config = ModelConfig.from_gguf(GGUF, vocab_size=151936, tie_embeddings=True)
    assert config.attention_bias
    assert config.head_dim == 64
    assert config.eos_ids == (151645,)
    assert config.num_parameters == 494_032_768  # as published
    factors = tuple([1.0] * 32)
    assert ModelConfig.from_gguf(GGUF, 151936, True, factors).rope_scaling == FrequencyFactors(factors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "phi3"}, "phi3"),
        ({"qwen2.expert_count": 8}, "experts"),
        ({"qwen2.rope.scaling.type": "yarn"}, "yarn"),
        ({"qwen2.rope.dimension_count": 32}, "dimension_count"),
    ],
)
def test_unsupported_gguf_features_are_rejected_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_gguf(GGUF | change, 151936, True)
