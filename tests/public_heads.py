"""Small random heads in the forms in which heads are published: config.json, and tensors in their published names and shapes.

Written from the sources of each form, and not from the reader. `states` are the hidden states that the form reads from a target
of seven layers, counted from the embedding.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.decoder.forward import DecoderModel
from paceline.models.draft_files.forms import DraftForm
from paceline.models.heads.block.block import BlockModel, BlockRunner
from paceline.models.heads.block.block_forms import read_block
from paceline.models.heads.eagle.eagle import EagleModel, EagleRunner
from paceline.speculation.proposers.block import BlockProposer
from paceline.speculation.proposers.eagle.eagle import EagleProposer
from paceline.speculation.proposers.medusa import MedusaProposer
from tests.fakes import TINY, tiny_model
from tests.heads import TensorWeights, eagle_model, medusa_model
from tests.specs import changed

SEVEN_LAYERS = changed(TINY, num_layers=7)
DEFAULT_STATES = (2, 3, 4)
"""2, n // 2 and n - 3 of seven layers."""
D, V, HEADS, KV, HD, FFN = TINY.hidden_size, TINY.vocab_size, 4, 2, 16, 48
REDUCED = 24


@dataclass(frozen=True)
class PublicHead:
    form: DraftForm
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    states: tuple[int, ...] = ()
    file: str = "model.safetensors"
    flags: frozenset[str] = frozenset()
    """What the reference computes in addition: see `reference_logits`."""
    names: Callable[[str], str] = field(default=str, repr=False)
    """The name in the file of a weight that the reference names."""

    def weight(self, name: str) -> Tensor:
        return self.tensors[self.names(name)].float()

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        if self.file.endswith(".safetensors"):
            save_file(tensors, folder / self.file)
        else:
            torch.save(tensors, folder / self.file)
        return folder


def target(device: str = "cpu") -> DecoderModel:
    return tiny_model(config=SEVEN_LAYERS, device=device)


def public_eagle(name: str, model: DecoderModel) -> EagleModel:
    """The head without a folder."""
    head = EAGLE_HEADS[name]()
    return eagle_model(head.config, head.tensors, model, head.form)


def public_block(name: str, model: DecoderModel) -> BlockModel:
    """The drafter without a folder."""
    head = BLOCK_HEADS[name]()
    return BlockModel(*read_block(name, head.form, head.config, TensorWeights(head.tensors), model.config), model)


def public_proposer(
    name: str, model: DecoderModel, num_blocks: int = 64
) -> EagleProposer | MedusaProposer | BlockProposer:
    if name in EAGLE_HEADS:
        return EagleProposer(EagleRunner(public_eagle(name, model), num_blocks, 32), 64)
    if name in BLOCK_HEADS:
        return BlockProposer(BlockRunner(public_block(name, model), num_blocks), 64)
    head = MEDUSA_HEADS[name]()
    return MedusaProposer(medusa_model(head.config, head.tensors, model, head.form))


class _Random:
    """Random weights from a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        return torch.randn(outputs, inputs, generator=self._generator) * (1.2 / inputs**0.5)

    def norm(self, size: int = D) -> Tensor:
        return 1.0 + 0.2 * torch.randn(size, generator=self._generator)


def _layer(draw: _Random, prefix: str, inputs: int, qk_norm: bool = False, width: int = D) -> dict[str, Tensor]:
    found = {
        f"{prefix}.self_attn.q_proj.weight": draw.matrix(HEADS * HD, inputs),
        f"{prefix}.self_attn.k_proj.weight": draw.matrix(KV * HD, inputs),
        f"{prefix}.self_attn.v_proj.weight": draw.matrix(KV * HD, inputs),
        f"{prefix}.self_attn.o_proj.weight": draw.matrix(width, HEADS * HD),
        f"{prefix}.mlp.gate_proj.weight": draw.matrix(FFN, width),
        f"{prefix}.mlp.up_proj.weight": draw.matrix(FFN, width),
        f"{prefix}.mlp.down_proj.weight": draw.matrix(width, FFN),
        f"{prefix}.post_attention_layernorm.weight": draw.norm(width),
    }
    if qk_norm:
        found |= {f"{prefix}.self_attn.{part}_norm.weight": draw.norm(HD) for part in "qk"}
    return found


def _vocabulary(draw: _Random, width: int = D, reduced: int = REDUCED) -> dict[str, Tensor]:
    ids = torch.linspace(1, V - 2, reduced).long()
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(reduced), "t2d": t2d, "lm_head.weight": draw.matrix(reduced, width)}


def _eagle3(
    layer: str, num_states: int = 3, seed: int = 1, qk_norm: bool = False, width: int = D, tables: bool = True
) -> dict[str, Tensor]:
    """The tensors of one layer called `layer`, with what surrounds it."""
    draw = _Random(seed)
    tensors = {
        "fc.weight": draw.matrix(width, num_states * D),
        **_layer(draw, layer, 2 * width, qk_norm, width),
        f"{layer}.input_layernorm.weight": draw.norm(width),
        f"{layer}.hidden_norm.weight": draw.norm(width),
        "norm.weight": draw.norm(width),
    }
    return tensors | (_vocabulary(draw, width) if tables else {})


def _shape(width: int = D, **extra: Any) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HD,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "vocab_size": V,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        **extra,
    }


def _speculators(
    flags: Sequence[str] = (), kind: str = "llama", layers: int = 1, states: Sequence[int] = (1, 3, 5), **extra: Any
) -> PublicHead:
    draw = _Random(7)
    tensors = _eagle3("layers.0", len(states), qk_norm=kind == "qwen3")
    for number in range(1, layers):
        prefix = f"layers.{number}"
        tensors |= {**_layer(draw, prefix, D, kind == "qwen3"), f"{prefix}.input_layernorm.weight": draw.norm()}
    if "fc_norm" in flags:
        tensors |= {f"fc_norm.{i}.weight": draw.norm() for i in range(len(states))}
    if "norm_before_fc" in flags:
        tensors["input_norm.weight"] = draw.norm(len(states) * D)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _shape(model_type=kind, num_hidden_layers=layers),
        "draft_vocab_size": REDUCED,
        "norm_before_residual": "norm_before_residual" in flags,
        **{flag: flag in flags for flag in ("fc_norm", "norm_before_fc", "norm_output")},
        "eagle_aux_hidden_state_layer_ids": list(states),
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/target"}},
        **extra,
    }
    return PublicHead("speculators", config, tensors, tuple(states), flags=frozenset(flags))


def _speculators_default() -> PublicHead:
    head = _speculators()
    return replace(head, config={**head.config, "eagle_aux_hidden_state_layer_ids": None}, states=DEFAULT_STATES)


def _speculators_own_tables() -> PublicHead:
    head, draw = _speculators(), _Random(3)
    tables = {"embed_tokens.weight": draw.matrix(V, D), "lm_head.weight": draw.matrix(V, D)}
    tensors = {name: tensor for name, tensor in head.tensors.items() if name not in ("d2t", "t2d")} | tables
    return replace(head, config={**head.config, "draft_vocab_size": V}, tensors=tensors)


def _midlayer(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


def _sglang(
    tensors: Mapping[str, Tensor] | None = None,
    states: tuple[int, ...] = DEFAULT_STATES,
    flags: Sequence[str] = (),
    names: Callable[[str], str] = _midlayer,
    **extra: Any,
) -> PublicHead:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": REDUCED,
        "tie_word_embeddings": False,
        **_shape(),
        **extra,
    }
    return PublicHead("sglang", config, tensors or _eagle3("midlayer"), states, flags=frozenset(flags), names=names)


def _sglang_layers() -> PublicHead:
    """Numbers of layers, whose outputs are the states after them."""
    numbers = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}
    return _sglang(states=(1, 3, 6), eagle_config=numbers)


def _sglang_old_norms() -> PublicHead:
    draw, old = _Random(4), ("low", "mid", "high")
    tensors = _eagle3("midlayer") | {f"aux_norm_{name}.weight": draw.norm() for name in old}

    def names(name: str) -> str:
        for number, part in enumerate(old):
            name = name.replace(f"fc_norm.{number}.", f"aux_norm_{part}.")
        return _midlayer(name)

    return _sglang(tensors, flags=("fc_norm",), names=names, use_aux_norm=True)


def _sglang_two_layers() -> PublicHead:
    """The input norm of the second layer is called hidden_norm, and names begin with `model.`."""
    draw = _Random(5)
    tensors = _eagle3("layers.0") | _layer(draw, "layers.1", D) | {"layers.1.hidden_norm.weight": draw.norm()}
    tensors = {name if "lm_head" in name or "2" in name else f"model.{name}": value for name, value in tensors.items()}

    def names(name: str) -> str:
        name = name.replace("layers.1.input_layernorm", "layers.1.hidden_norm")
        return name if "lm_head" in name or "2" in name else f"model.{name}"

    return _sglang(
        tensors, flags=("norm_output",), names=names, num_hidden_layers=2, eagle_config={"norm_output": True}
    )


def _sglang_narrow() -> PublicHead:
    """A head whose width is not that of its target, with tables of its own."""
    tensors = _eagle3("midlayer", width=16) | {"embed_tokens.weight": _Random(6).matrix(V, 16)}
    return _sglang(tensors, target_hidden_size=D, hidden_size=16)


def _sglang_tied() -> PublicHead:
    tensors = _eagle3("midlayer", tables=False) | {"embed_tokens.weight": _Random(6).matrix(V, D)}
    head = _sglang(tensors, tie_word_embeddings=True, draft_vocab_size=None)
    return replace(head, names=lambda name: "embed_tokens.weight" if name == "lm_head.weight" else _midlayer(name))


def _eagle3_pickle() -> PublicHead:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": REDUCED, **_shape()}
    return PublicHead("eagle3", config, _eagle3("midlayer"), DEFAULT_STATES, "pytorch_model.bin", names=_midlayer)


def _eagle1(has_bias: bool = True, has_qkv_bias: bool = False) -> PublicHead:
    draw = _Random(8)
    tensors = {
        "embed_tokens.weight": draw.matrix(V, D),  # a copy of the target's in the published files; nothing reads it
        "fc.weight": draw.matrix(D, 2 * D),
        **_layer(draw, "layers.0", D),
    }
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_shape()}
    if has_bias:
        tensors["fc.bias"] = draw.norm() - 1.0
    else:
        config["bias"] = False
    if has_qkv_bias:
        sizes = {"q": HEADS * HD, "k": KV * HD, "v": KV * HD}
        tensors |= {f"layers.0.self_attn.{part}_proj.bias": draw.norm(size) - 1.0 for part, size in sizes.items()}
    return PublicHead("eagle1", config, tensors, (7,), "pytorch_model.bin", frozenset({"eagle1"}))


def _deepspec() -> PublicHead:
    tensors = _eagle3("layers.0", 5, qk_norm=True, tables=False)
    tensors |= {"embed_tokens.weight": _Random(9).matrix(V, D), "lm_head.weight": _Random(10).matrix(V, D)}
    config = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [-1, 1, 2, 3, 5],
        "ttt_length": 7,
        **_shape(),
    }
    return PublicHead("deepspec", config, tensors, (0, 2, 3, 4, 6))


def _medusa() -> PublicHead:
    """Three heads of two layers. The configuration names another number, as published ones do."""
    draw, tensors = _Random(11), dict[str, Tensor]()
    for head in range(3):
        for layer in range(2):
            tensors[f"{head}.{layer}.linear.weight"] = draw.matrix(D, D)
            tensors[f"{head}.{layer}.linear.bias"] = draw.norm() - 1.0
        tensors[f"{head}.2.weight"] = draw.matrix(V, D)
    config = {"base_model_name_or_path": "org/target", "medusa_num_heads": 2, "medusa_num_layers": 1}
    return PublicHead("medusa", config, tensors, file="medusa_lm_head.pt")


def _medusa_vllm() -> PublicHead:
    draw, tensors = _Random(12), dict[str, Tensor]()
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = draw.matrix(D, D)
        tensors[f"lm_heads.{head}.weight"] = draw.matrix(REDUCED, D)
    tensors["token_map"] = torch.linspace(1, V - 2, REDUCED).long()
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": D,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "truncated_vocab_size": REDUCED,
    }
    return PublicHead("medusa_vllm", config, tensors)


MASK = 3


def _block_tensors(states: int, layers: int, tables: Sequence[str] = (), seed: int = 13) -> dict[str, Tensor]:
    draw = _Random(seed)
    tensors = {"fc.weight": draw.matrix(D, states * D), "hidden_norm.weight": draw.norm(), "norm.weight": draw.norm()}
    for number in range(layers):
        prefix = f"layers.{number}"
        tensors |= {**_layer(draw, prefix, D, qk_norm=True), f"{prefix}.input_layernorm.weight": draw.norm()}
    return tensors | {f"{name}.weight": draw.matrix(V, D) for name in tables}


def _markov(kind: str, rank: int = 8, proposed: int = V) -> dict[str, Tensor]:
    draw = _Random(14)
    tensors = {"markov_w1.weight": draw.matrix(V, rank), "markov_w2.weight": 3.0 * draw.matrix(proposed, rank)}
    if kind == "gated":
        tensors |= {"gate_proj.weight": draw.matrix(rank, D + rank), "gate_proj.bias": draw.norm(rank) - 1.0}
    if kind == "rnn":
        tensors |= {
            "joint_proj.weight": draw.matrix(3 * rank, 2 * rank + D),
            "joint_proj.bias": draw.norm(3 * rank) - 1.0,
        }
    found = {f"markov_head.{name}": tensor for name, tensor in tensors.items()}
    return found | {"confidence_head.proj.weight": draw.matrix(1, D + rank), "confidence_head.proj.bias": draw.norm(1)}


def _dflash() -> PublicHead:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
        **_shape(num_hidden_layers=2),
    }
    return PublicHead("dflash", config, _block_tensors(3, 2), (2, 4, 6))


def _dspark(kind: str = "vanilla", has_own_tables: bool = True) -> PublicHead:
    """The form of DeepSpec, with tables of its own, or that of SpecForge."""
    tensors = _block_tensors(2, 2, ("embed_tokens", "lm_head") if has_own_tables else ())
    keys: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": [-1, 4], "block_size": 5}
    if kind == "none":
        keys["markov_rank"] = 0
    else:
        tensors |= _markov(kind)
        keys |= {"markov_rank": 8, "markov_head_type": kind, "enable_confidence_head": True, "num_anchors": 64}
    config = {"model_type": "qwen3", **_shape(num_hidden_layers=2)}
    if has_own_tables:
        config |= {"architectures": ["Qwen3DSparkModel"], **keys}
    else:
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark", **keys}}
    return PublicHead("dspark", config, tensors, (0, 5), flags=frozenset({kind, "predicts next"}))


def _speculators_block(kind: str) -> PublicHead:
    """DFlash or DSpark with a reduced vocabulary."""
    tensors = _block_tensors(2, 1) | _vocabulary(_Random(15))
    config = {
        "architectures": ["DFlashSpeculator" if kind == "dflash" else "DSparkSpeculator"],
        "speculators_model_type": kind,
        "transformer_layer_config": _shape(model_type="qwen3"),
        "draft_vocab_size": REDUCED,
        "block_size": 4,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 5],
        "sample_from_anchor": kind == "dspark",
    }
    if kind == "dflash":
        return PublicHead("speculators_dflash", config, tensors, (2, 5))
    config |= {"markov_rank": 8, "markov_head_type": "vanilla"}
    flags = frozenset({"vanilla", "predicts next"})
    return PublicHead("speculators_dspark", config, tensors | _markov("vanilla", proposed=REDUCED), (2, 5), flags=flags)


BLOCK_HEADS: dict[str, Callable[[], PublicHead]] = {
    "dflash": _dflash,
    "dspark": _dspark,
    "dspark gated": lambda: _dspark("gated"),
    "dspark rnn": lambda: _dspark("rnn"),
    "dspark without markov": lambda: _dspark("none"),
    "dspark specforge": lambda: _dspark(has_own_tables=False),
    "speculators dflash": lambda: _speculators_block("dflash"),
    "speculators dspark": lambda: _speculators_block("dspark"),
}
EAGLE_HEADS: dict[str, Callable[[], PublicHead]] = {
    "speculators": _speculators,
    "speculators default states": _speculators_default,
    "speculators normed residual": lambda: _speculators(["norm_before_residual"]),
    "speculators qwen3": lambda: _speculators(kind="qwen3"),
    "speculators two layers": lambda: _speculators(layers=2),
    "speculators qwen3 three layers": lambda: _speculators(["norm_output"], "qwen3", 3),
    "speculators fc_norm": lambda: _speculators(["fc_norm", "norm_output"]),
    "speculators norm_before_fc": lambda: _speculators(["norm_before_fc"]),
    "speculators norm_output": lambda: _speculators(["norm_output"]),
    "speculators five states": lambda: _speculators(["fc_norm"], states=(0, 1, 3, 5, 6)),
    "speculators own tables": _speculators_own_tables,
    "sglang": _sglang,
    "sglang layer numbers": _sglang_layers,
    "sglang old norms": _sglang_old_norms,
    "sglang two layers": _sglang_two_layers,
    "sglang narrow": _sglang_narrow,
    "sglang tied": _sglang_tied,
    "eagle3 pickle": _eagle3_pickle,
    "eagle1 pickle": _eagle1,
    "eagle1 without bias": lambda: _eagle1(has_bias=False),
    "eagle1 qkv bias": lambda: _eagle1(has_qkv_bias=True),
    "deepspec": _deepspec,
}
MEDUSA_HEADS: dict[str, Callable[[], PublicHead]] = {"medusa": _medusa, "medusa vllm": _medusa_vllm}
PUBLIC_HEADS = EAGLE_HEADS | MEDUSA_HEADS | BLOCK_HEADS
