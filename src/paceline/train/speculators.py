"""Writes a trained EAGLE head as a folder in the format of `speculators`, which vLLM loads.

The folder has its own rows of the target's output head; the embedding stays the target's.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.bench.inflate import hf_config
from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.kernels.weights import Dense
from paceline.models.architectures.config import ModelConfig
from paceline.models.drafts.folder import open_draft_folder
from paceline.models.loading.checkpoint import Checkpoint
from paceline.models.loading.hub import find_model
from paceline.models.loading.load import open_checkpoint

FORMAT = "0.3.0"
"""Version of the format, as the field `speculators_version`."""
WEIGHTS = "model.safetensors"


def export_head(draft: str | Path, target: str | Path, out: Path, speculative_tokens: int = 3) -> None:
    """Write the EAGLE head `draft` of `target` to the new folder `out`. Raises `UnsupportedModel` for other drafts.

    `speculative_tokens` is the default depth that the folder names. vLLM may be given another depth.
    """
    source = find_model(draft)
    folder = open_draft_folder(source) if source.is_dir() else None
    if folder is None or folder.kind != "eagle" or folder.is_published:
        raise UnsupportedModel(
            f"{draft} is not an EAGLE head of `paceline train`: only these have a layer in the format of speculators"
        )
    if out.exists():
        raise InvalidRequest(f"{out} exists: give another folder, or remove it", field="out")
    checkpoint = open_checkpoint(target)
    folder.check_target(checkpoint.config, checkpoint.read_tokenizer())
    tensors = load_file(source / WEIGHTS)
    tensors |= _vocabulary(checkpoint, tensors.get("d2t"))
    config = _config(folder.config, checkpoint.config, str(target), speculative_tokens)
    work = out.with_name(out.name + ".part")
    work.mkdir(parents=True)
    try:
        save_file({name: value.contiguous() for name, value in tensors.items()}, work / WEIGHTS, {"format": "pt"})
        (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        shutil.copymode(work / "config.json", work / WEIGHTS)  # save_file makes it readable by its owner only
        work.rename(out)
    except BaseException:
        shutil.rmtree(work)
        raise


def _vocabulary(checkpoint: Checkpoint, offsets: Tensor | None) -> dict[str, Tensor]:
    """The head's rows of the target's output matrix, and the maps between the two vocabularies."""
    size = checkpoint.config.vocab_size
    ids = torch.arange(size) if offsets is None else torch.arange(len(offsets)) + offsets.to(torch.int64)
    name = "lm_head.weight" if "lm_head.weight" in checkpoint.weights.names() else "model.embed_tokens.weight"
    weight = checkpoint.weights.matrix(name)
    values = weight.values if isinstance(weight, Dense) else weight.dequantize()
    is_drafted = torch.zeros(size, dtype=torch.bool)
    is_drafted[ids] = True
    return {"lm_head.weight": values[ids].to(torch.bfloat16), "d2t": ids - torch.arange(len(ids)), "t2d": is_drafted}


def _config(draft: Any, target: ModelConfig, name: str, speculative_tokens: int) -> dict[str, Any]:
    layer = hf_config(target) | {
        "intermediate_size": draft["ffn_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": draft["num_heads"],
        "num_key_value_heads": draft["num_kv_heads"],
        "head_dim": draft["head_dim"],
        "rms_norm_eps": draft["rms_eps"],
        "rope_theta": draft["rope_theta"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    del layer["architectures"]
    method = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "draft_vocab_size": draft["draft_vocab_size"] or target.vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(draft["capture"]),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": name, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
