"""For gpu.py: `transformers` on the same weights in memory, plain, compiled, and with assisted generation."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paceline.engine.engine import Engine
from paceline.models.architectures.llama import DecoderModel


def as_transformers(model: DecoderModel) -> Any:
    """A `LlamaForCausalLM` whose parameters are views of those of `model`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.ffn_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_eps,
        max_position_embeddings=c.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.device("meta"):
        other = LlamaForCausalLM(config).to(model.dtype)
    other.load_state_dict(_names(model), assign=True)
    other.model.rotary_emb = type(other.model.rotary_emb)(config).to(model.device)
    other.generation_config.eos_token_id = None
    return other.eval()


def _names(model: DecoderModel) -> dict[str, Tensor]:
    c = model.config
    named = {
        "model.embed_tokens.weight": model.embedding.values,
        "lm_head.weight": model.head.values,
        "model.norm.weight": model.norms_after[-1],
    }
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        heads = [c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim]
        for name, part in zip("qkv", layer.qkv.values.split(heads), strict=True):
            named[f"{prefix}self_attn.{name}_proj.weight"] = part
        named[f"{prefix}self_attn.o_proj.weight"] = layer.output.values
        named[f"{prefix}mlp.gate_proj.weight"], named[f"{prefix}mlp.up_proj.weight"] = layer.gate_up.values.chunk(2)
        named[f"{prefix}mlp.down_proj.weight"] = layer.down.values
        named[f"{prefix}input_layernorm.weight"] = layer.input_norm
        named[f"{prefix}post_attention_layernorm.weight"] = layer.post_attention_norm
    return named


def compare(engine: Engine, prompts: list[list[int]], tokens: int, ours: dict[str, float]) -> None:
    target = as_transformers(engine.runner.model)
    draft = as_transformers(engine.speculator.proposers["draft_model"].runner.model)
    count = min(tokens, 48)

    def each(generate: Callable[[Tensor], Any], prompts: list[list[int]]) -> float:
        """Milliseconds per token; a second run of one token removes the prefill."""
        times = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            spans = []
            for length in (1, count):
                torch.cuda.synchronize()
                started = time.perf_counter()
                generate(ids, max_new_tokens=length, min_new_tokens=length)
                torch.cuda.synchronize()
                spans.append(time.perf_counter() - started)
            times.append((spans[1] - spans[0]) / (count - 1) * 1e3)
        return median(times)

    def plain(ids: Tensor, **options: Any) -> Any:
        return target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)

    def assisted(ids: Tensor, **options: Any) -> Any:
        return plain(ids, assistant_model=draft, **options)

    def compiled(ids: Tensor, **options: Any) -> Any:
        return plain(ids, cache_implementation="static", **options)

    for name, value in ours.items():
        print(f"Paceline, {name}: {value:.2f} ms/token", flush=True)
    for name, generate in (("plain", plain), ("compiled, static cache", compiled), ("assisted", assisted)):
        try:
            with torch.inference_mode():
                each(generate, prompts[:1])
                value = each(generate, prompts[:5])
        except Exception as error:
            print(f"transformers, {name}: {type(error).__name__}: {error}")
            continue
        print(
            f"transformers, {name}: {value:.2f} ms/token; Paceline speculative is {value / ours['speculative']:.1f}x faster",
            flush=True,
        )
