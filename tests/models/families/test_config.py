import pytest

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from paceline.models.families.read import read_config, read_gguf_config
from tests.models.tiny import ROW_OF

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
MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 512}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}


def test_every_family_has_a_tiny_model() -> None:
    assert [name for name, row in ROW_OF.items() if row is None] == [], "add a row to FAMILIES of tests/models/tiny.py"


def test_llama_3_8b() -> None:
    config = read_config(HF)
    assert config.head_dim == 128
    assert config.eos_ids == (128001, 128008, 128009)
    assert config.num_parameters == 8_030_261_248  # as published
    assert config.kv_bytes_per_token(2) == 131072
    assert config.rotary[0].scaling is None
    assert config.sliding_window is None


def test_rope_is_read_from_both_formats_of_transformers() -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    old = read_config(HF | {"rope_scaling": llama3 | {"rope_type": "llama3"}})
    new = {k: v for k, v in HF.items() if k != "rope_theta"}
    new = read_config(new | {"rope_parameters": llama3 | {"rope_type": "llama3", "rope_theta": 500000.0}})
    assert old == new
    assert old.rotary[0].scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert read_config(HF | {"rope_scaling": {"type": "linear", "factor": 2}}).rotary[0].scaling == LinearScaling(2.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3"}, "gemma3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "GPTQ of 3 bits"),
        ({"num_key_value_heads": 5}, "5 key-value heads"),
        ({"num_local_experts": 8}, "mixture of experts"),
        (MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (MOE | {"num_experts_per_tok": 9}, "9 of 8 experts"),
        (MOE | {"moe_intermediate_size": 40}, "width of 40"),
        (GEMMA | {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA | {"layer_types": ["chunked_attention"] * 32}, "chunked_attention"),
        (GPT_OSS | {"swiglu_limit": 6.0}, "swiglu_limit"),
        (GPT_OSS | {"attention_bias": False}, "attention_bias"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ],
)
def test_unsupported_features_are_rejected_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_config(HF | change)


def test_an_unknown_architecture_is_rejected_first() -> None:
    with pytest.raises(UnsupportedModel, match=r"'gemma3'.*llama, .*mistral, .*qwen2, qwen3"):
        read_config({"model_type": "gemma3", "text_config": {}})
    with pytest.raises(UnsupportedModel, match="unknown"):
        read_config({})


def test_sliding_windows() -> None:
    assert read_config(HF | {"model_type": "mistral", "sliding_window": 4096}).sliding_window == 4096
    qwen = HF | {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 0}
    assert read_config(qwen | {"use_sliding_window": False}).sliding_window is None
    assert read_config(qwen | {"use_sliding_window": True}).sliding_window == 4096
    mixed = read_config(qwen | {"use_sliding_window": True, "max_window_layers": 8})
    assert [mixed.layers[7].window, mixed.layers[8].window] == [None, 4096]
    assert mixed.attended(8192) == (8 * 8192 + 24 * 4096) // 32
    assert read_config(qwen | {"use_sliding_window": True, "max_window_layers": 32}).sliding_window is None


def test_qwen3_30b_a3b() -> None:
    shape = {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    }
    config = read_config(HF | MOE | shape | {"num_experts": 128, "num_experts_per_tok": 8})
    assert config.num_parameters == 30_532_122_624  # as published
    assert config.heads.has_qk_norm
    assert config.experts is not None
    assert not config.experts.normalizes


def test_gemma_3_reads_both_formats_of_transformers() -> None:
    old = read_config(
        HF
        | GEMMA
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert old == read_config(HF | GEMMA | {"rope_parameters": rope})
    assert old.rotary[0].scaling == LinearScaling(8.0)
    assert old.full_layers == (5, 11, 17, 23, 29)
    assert [old.layers[4].rotary, old.layers[5].rotary] == [1, 0]
    assert old.heads.scale == 256**-0.5
    assert old.tie_embeddings
    rope["sliding_attention"] = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="sliding window"):
        read_config(HF | GEMMA | {"rope_parameters": rope})


def test_gpt_oss_20b() -> None:
    shape = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    config = read_config(HF | GPT_OSS | shape | {"head_dim": 64, "vocab_size": 201088, "rope_scaling": yarn})
    assert config.num_parameters == 20_914_757_184  # as published
    assert [config.layers[0].window, config.layers[1].window] == [128, None]
    assert isinstance(config.rotary[0].scaling, YarnScaling)
    assert config.rotary[0].scaling.magnitude == pytest.approx(1.3465735902799727)


def test_gguf_metadata() -> None:
    config = read_gguf_config(GGUF, vocab_size=151936, tie_embeddings=True)
    assert config.heads.has_bias
    assert config.head_dim == 64
    assert config.eos_ids == (151645,)
    assert config.num_parameters == 494_032_768  # as published
    factors = tuple([1.0] * 32)
    assert read_gguf_config(GGUF, 151936, True, factors).rotary[0].scaling == FrequencyFactors(factors)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "phi2"}, "phi2"),
        ({"qwen2.expert_count": 8}, "experts"),
        ({"qwen2.rope.scaling.type": "longrope"}, "longrope"),
        ({"qwen2.rope.dimension_count": 32}, "dimension_count"),
    ],
)
def test_unsupported_gguf_features_are_rejected_by_name(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read_gguf_config(GGUF | change, 151936, True)
