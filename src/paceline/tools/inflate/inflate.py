"""Writes an inflated model as a Hugging Face folder, which other engines can load."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.kernels.formats.quantized import Quantization, QuantizedWeight
from paceline.kernels.formats.weights import Dense
from paceline.kernels.rope import LinearScaling, Llama3Scaling
from paceline.model_files.hub import Inflation
from paceline.model_files.tokenizer import Tokenizer
from paceline.models.families.spec import DecoderSpec
from paceline.models.loading import inflate, open_checkpoint
from paceline.models.weights import Checkpoint, QuantizedWeights

SHARD_BYTES = 4 * 2**30
"""Largest size of a file, and about the memory that writing takes."""


def make(
    inflation: Inflation, device: torch.device, dtype: torch.dtype, quantization: Quantization | None = None
) -> Checkpoint:
    """The large model. Its matrices are generated on `device` at first use."""
    large = inflate(open_checkpoint(inflation.base), inflation, device, dtype)
    if quantization is None:
        return large
    return replace(large, weights=QuantizedWeights(large.weights, quantization, device))


def write_folder(
    checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Write config, weights and tokenizer, and return the bytes of the weights. `progress` receives (tensors done, all
    tensors).

    The folder gets its name when it is complete.
    """
    if folder.exists():
        raise InvalidRequest(f"{folder} exists: give another folder, or remove it", field="out")
    work = folder.with_name(folder.name + ".part")
    if work.exists():
        raise InvalidRequest(f"{work} is left from an interrupted run: remove it", field="out")
    work.mkdir(parents=True)
    try:
        size = _write_weights(checkpoint, work, progress)
        content = hf_config(checkpoint.config) | _quantization_config(checkpoint)
        (work / "config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        write_tokenizer(checkpoint.read_tokenizer(), checkpoint.config, work)
        for file in work.glob("*.safetensors"):  # save_file makes them readable by their owner only
            shutil.copymode(work / "config.json", file)
        work.rename(folder)
    except BaseException:
        shutil.rmtree(work)
        raise
    return size


def _write_weights(checkpoint: Checkpoint, folder: Path, progress: Callable[[int, int], None]) -> int:
    names = sorted(checkpoint.weights.names())
    shards: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    size = count = 0

    def flush() -> None:
        nonlocal count
        count += 1
        file = f"model-{count:05}.safetensors"
        save_file(pending, folder / file, metadata={"format": "pt"})
        shards.update(dict.fromkeys(pending, file))
        pending.clear()

    for done, name in enumerate(names):
        tensors = _tensors(checkpoint, name)
        added = sum(tensor.nbytes for tensor in tensors.values())
        if pending and sum(tensor.nbytes for tensor in pending.values()) + added > SHARD_BYTES:
            flush()
        pending.update(tensors)
        size += added
        progress(done + 1, len(names))
    flush()
    index = {"metadata": {"total_size": size}, "weight_map": shards}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", "utf-8")
    return size


def _tensors(checkpoint: Checkpoint, name: str) -> dict[str, Tensor]:
    if name.endswith("norm.weight"):
        return {name: checkpoint.weights.vector(name)}
    weight = checkpoint.weights.matrix(name)
    if isinstance(weight, QuantizedWeight):
        return {name: weight.values.cpu(), f"{name}_scale": weight.scales.cpu()}
    values = weight.values if isinstance(weight, Dense) else weight.dequantize()
    return {name: values.cpu()}


def _quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The compressed-tensors entry for weights with one scale per output."""
    weight = checkpoint.weights.matrix("model.layers.0.self_attn.k_proj.weight")
    if not isinstance(weight, QuantizedWeight):
        return {}
    kind = "int" if weight.values.dtype is torch.int8 else "float"
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    scheme = {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return {"quantization_config": scheme}


def hf_config(config: DecoderSpec) -> dict[str, Any]:
    """config.json of a Llama of this shape, as transformers 4 and 5 read it."""
    scaling: dict[str, Any] | None
    match config.rotary[0].scaling:
        case None:
            scaling = None
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
        case _:
            raise UnsupportedModel(
                "config.json cannot hold this GGUF's rope factors: use the safetensors of the same model"
            )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rotary[0].theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
    }


def write_tokenizer(tokenizer: Tokenizer, config: DecoderSpec, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), "utf-8")
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position}
    content |= tokenizer.special_tokens
    if tokenizer.chat_template is not None:
        content["chat_template"] = tokenizer.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": sorted(tokenizer.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
