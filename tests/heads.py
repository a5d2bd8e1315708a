"""Tiny drafts for a tiny target: random heads, and folders in our format and that of `speculators`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.kernels.formats.weights import Dense
from paceline.kv.block_tables import BlockTables
from paceline.models.decoder.forward import DecoderModel
from paceline.models.draft_files.forms import DraftForm
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.models.heads.eagle.eagle_forms import read_eagle
from paceline.models.heads.medusa import MedusaModel, read_medusa
from paceline.models.heads.trained import DistilledModel
from paceline.models.runner.runner import ModelRunner
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from paceline.speculation.proposers.model.draft_model import DraftModelProposer
from paceline.speculation.proposers.model.layer_skip import LayerSkipProposer


class TensorWeights:
    """`Weights` over tensors in memory."""

    file_bytes = 0

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def is_float(self, name: str) -> bool:
        return self.tensors[name].dtype in (torch.float32, torch.float16, torch.bfloat16)

    def matrix(self, name: str) -> Dense:
        return Dense(self.tensors[name])

    def vector(self, name: str) -> Tensor:
        return self.tensors[name].float()


def draft_config(model: DecoderModel, kind: str, /, **extra: Any) -> dict[str, Any]:
    """config.json of a draft in our layout."""
    c = model.config
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 48, "rope_theta": 10_000.0}
    own: dict[str, dict[str, Any]] = {
        "eagle": {**shape, "capture": sorted({0, 1, c.num_layers})},
        "medusa": {"num_heads": 3},
        "distilled": {**shape, "num_layers": 2, "max_position": 512},
    }
    return {
        "paceline_draft": kind,
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "rms_eps": c.rms_eps,
        "draft_vocab_size": None,
        "target": {"name": "tiny"},
        **own[kind],
        **extra,
    }


def draft_tensors(config: Mapping[str, Any], seed: int = 0, reduced: int | None = None) -> dict[str, Tensor]:
    """Random weights under the names of the layout; `reduced` keeps so many tokens, spread over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    d, kind = config["hidden_size"], config["paceline_draft"]

    def matrix(outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=generator) * (1.2 / inputs**0.5)

    def vector(size: int) -> Tensor:
        return 1.0 + 0.1 * torch.randn(size, generator=generator)

    tensors: dict[str, Tensor] = {}
    if kind == "medusa":
        for k in range(1, config["num_heads"] + 1):
            tensors[f"heads.{k}.weight"] = matrix(d, d)
            tensors[f"heads.{k}.bias"] = vector(d) - 1.0
    else:
        q, kv = config["num_heads"] * config["head_dim"], config["num_kv_heads"] * config["head_dim"]
        width = 2 * d if kind == "eagle" else d
        for i in range(config.get("num_layers", 1)):
            prefix = f"layers.{i}"
            for name, shape in {
                "self_attn.q_proj": (q, width),
                "self_attn.k_proj": (kv, width),
                "self_attn.v_proj": (kv, width),
                "self_attn.o_proj": (d, q),
                "mlp.gate_proj": (config["ffn_size"], d),
                "mlp.up_proj": (config["ffn_size"], d),
                "mlp.down_proj": (d, config["ffn_size"]),
            }.items():
                tensors[f"{prefix}.{name}.weight"] = matrix(*shape)
            tensors[f"{prefix}.input_layernorm.weight"] = vector(d)
            tensors[f"{prefix}.post_attention_layernorm.weight"] = vector(d)
        tensors["norm.weight"] = vector(d)
        if kind == "eagle":
            tensors["fc.weight"] = matrix(d, len(config["capture"]) * d)
            tensors["layers.0.hidden_norm.weight"] = vector(d)
        else:
            tensors["embed_norm.weight"] = vector(d)
    if reduced is not None:
        tensors |= vocabulary_map(reduced, config["vocab_size"])
    return tensors


def vocabulary_map(reduced: int, vocab_size: int) -> dict[str, Tensor]:
    ids = torch.linspace(0, vocab_size - 1, reduced).long()
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(reduced), "t2d": t2d}


def save_draft(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    stored = {k: v.bfloat16() if v.is_floating_point() else v for k, v in tensors.items()}
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors")
    return str(folder)


def tiny_eagle(target: DecoderModel, seed: int = 0, reduced: int | None = None) -> EagleModel:
    config = draft_config(target, "eagle")
    return eagle_model(config, draft_tensors(config, seed, reduced), target)


def eagle_model(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: DecoderModel, form: DraftForm = "paceline"
) -> EagleModel:
    return EagleModel(*read_eagle("the head", form, config, TensorWeights(tensors), target.config), target)


def tiny_medusa(target: DecoderModel, seed: int = 0, reduced: int | None = None) -> MedusaModel:
    config = draft_config(target, "medusa")
    return medusa_model(config, draft_tensors(config, seed, reduced), target)


def medusa_model(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: DecoderModel, form: DraftForm = "paceline"
) -> MedusaModel:
    return MedusaModel(*read_medusa("the head", form, config, TensorWeights(tensors), target.config), target)


def tiny_distilled(target: DecoderModel, seed: int = 0, reduced: int | None = None) -> DistilledModel:
    config = draft_config(target, "distilled")
    return DistilledModel(config, TensorWeights(draft_tensors(config, seed, reduced)), target)


def eagle(
    target: DecoderModel, num_blocks: int = 64, max_rows: int = 64, lanes: int = 32, **options: Any
) -> EagleProposer:
    return EagleProposer(EagleRunner(tiny_eagle(target, **options), num_blocks, lanes), max_rows)


def medusa(target: DecoderModel, **options: Any) -> MedusaProposer:
    return MedusaProposer(tiny_medusa(target, **options))


def distilled(target: DecoderModel, num_blocks: int = 64, max_rows: int = 64, **options: Any) -> DraftModelProposer:
    size = target.config.vocab_size
    return DraftModelProposer(ModelRunner(tiny_distilled(target, **options), num_blocks), max_rows, size, size)


class LayerSkip:
    """A factory of `layer_skip`, which needs the target's runner and tables."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers

    def __call__(self, runner: ModelRunner, tables: BlockTables) -> LayerSkipProposer:
        return LayerSkipProposer(runner, tables, self._num_layers)
