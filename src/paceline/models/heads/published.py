"""What published heads of several kinds have in common: layers in the form of Hugging Face, embedding, head, vocabulary map."""

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import IncompatibleDraft, UnsupportedModel
from paceline.model_files import Metadata
from paceline.models.draft_files import NamedWeights
from paceline.models.families.flat import flat_spec
from paceline.models.families.read import read_config
from paceline.models.families.rope import rope_from_hf
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.vocabulary import draft_ids


def read_layers(config: Mapping[str, Any], weights: NamedWeights, target: DecoderSpec) -> DecoderSpec:
    """The layers of a head from keys in the form of Hugging Face. Layers of the type qwen3 have norms of heads."""
    names, fields = weights.names(), Metadata("config.json of the draft", config)
    kind = "qwen3" if "layers.0.self_attn.q_norm.weight" in names else "llama"
    if fields.text("model_type", kind) != kind:
        raise UnsupportedModel(
            f"config.json has layers of the type {fields.text('model_type')[:40]!r}, and the weights are those of {kind}; "
            "supported: llama and qwen3"
        )
    kinds = fields.array("layer_types", str) if "layer_types" in fields else []
    if "sliding_attention" in kinds or fields.flag("use_sliding_window", False):
        raise UnsupportedModel(
            "config.json has layers of the type sliding_attention, which a head is not supported with"
        )
    shape = read_config({**config, "model_type": kind})
    theta, scaling = rope_from_hf(config)
    return flat_spec(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_size=shape.ffn_size,
        rms_eps=shape.rms_eps,
        rope_theta=theta,
        max_position=target.max_position,
        rope_scaling=scaling,
        attention_bias="layers.0.self_attn.q_proj.bias" in names,
        qk_norm=kind == "qwen3",
    )


def table_shapes(
    source: str, width: int, state_size: int, weights: NamedWeights, target: DecoderSpec
) -> dict[str, tuple[int, ...]]:
    """Shapes of the embedding, the head and the vocabulary map that the file of a head of this width has. Raises
    `IncompatibleDraft` if the target has states or tokens of another number."""
    names, found = weights.names(), dict[str, tuple[int, ...]]()
    if state_size != target.hidden_size:
        raise IncompatibleDraft(
            f"{source} was trained for a target of hidden size {state_size}, and this target has "
            f"{target.hidden_size}: train a draft for it with `paceline train`"
        )
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in names and width != target.hidden_size:
            raise UnsupportedModel(f"{source} has no {name}, and its hidden size {width} is not that of the target")
    if "embed_tokens.weight" in names:
        rows = _rows(weights, "embed_tokens.weight")
        if rows != target.vocab_size:
            raise IncompatibleDraft(
                f"{source} was trained for a target of {rows} tokens, and this target has {target.vocab_size}: train a "
                "draft for it with `paceline train`"
            )
        found["embed_tokens.weight"] = rows, width
    ids = draft_ids(weights, target.vocab_size)
    if ids is not None:
        found["d2t"] = (len(ids),)
    if "lm_head.weight" in names:
        rows = _rows(weights, "lm_head.weight")
        if ids is None and rows != target.vocab_size:
            raise UnsupportedModel(
                f"{source} has no d2t, which says what tokens the {rows} rows of its lm_head.weight are; the target has "
                f"{target.vocab_size} tokens"
            )
        found["lm_head.weight"] = target.vocab_size if ids is None else len(ids), width
    return found


def _rows(weights: NamedWeights, name: str) -> int:
    shape = weights.shape(name)
    if len(shape) != 2:
        raise UnsupportedModel(f"{name} of the draft has the shape {shape}: expected a matrix")
    return shape[0]
