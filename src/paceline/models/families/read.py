"""Reads the description of a model from a Hugging Face config.json or from GGUF metadata.

Features that the forward pass does not support are rejected here, by name, before any weight is read.
"""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.model_files import Metadata
from paceline.models.families.fields import HEADS, Fields, GGUFFields
from paceline.models.families.prequantized import check_scheme
from paceline.models.families.registry import families, gguf_families
from paceline.models.families.spec import DecoderSpec


def read_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The model of a config.json, as written by transformers 4 or 5. Of a model for text and images, its text part."""
    config = text_config(config) or config
    name = Metadata("config.json", config).text("model_type", "unknown")
    _check_architecture(name, families())
    family = families()[name]
    config = {**family.defaults, **config}
    values = Metadata("config.json", config)
    check_scheme(values)
    return family.describe(Fields(name, values, config))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration of the text part of a model for text and images, if its family is supported. None for other models."""
    values = Metadata("config.json", config)
    text = values.section("text_config")
    if text.text("model_type", "") not in families():
        return None
    ends = [*values.token_ids("eos_token_id"), *text.token_ids("eos_token_id")]
    shared = {key: config[key] for key in ("quantization_config", "bos_token_id") if key in config}
    return {**shared, **config["text_config"], "eos_token_id": list(dict.fromkeys(ends)) or None}


def read_gguf_config(
    metadata: Mapping[str, Any],
    vocab_size: int,
    tie_embeddings: bool,
    frequency_factors: tuple[float, ...] | None = None,
    names: Collection[str] = (),
) -> DecoderSpec:
    """The model of GGUF metadata, and of tensors where the metadata is incomplete.

    `frequency_factors` is the tensor rope_freqs.weight, which holds the rope scaling of Llama 3 files. `names` are those of all
    tensors.
    """
    name = Metadata("the GGUF header", metadata).text("general.architecture", "unknown")
    _check_architecture(name, gguf_families(), f" as GGUF: {_folder_advice(name)}")
    values = Metadata("the GGUF header", {key.removeprefix(f"{name}."): value for key, value in metadata.items()})
    family = gguf_families()[name]
    spec = family.describe(GGUFFields(family.name, values, vocab_size, tie_embeddings, frequency_factors, names))
    if spec.experts is None and values.count("expert_count", HEADS, 0, least=0):
        raise UnsupportedModel(f"{name!r} with experts is supported as a folder with safetensors, not as a GGUF file")
    return spec


def _folder_advice(name: str) -> str:
    """What to do with a GGUF file of this architecture."""
    known = [family for family in families() if family.replace("_", "").startswith(name.replace("-", ""))]
    if known:
        return "use the folder with config.json and the safetensors files of the same model"
    return f"use a model of one of these; folders with safetensors may also be: {', '.join(families())}"


def _check_architecture(name: str, supported: Collection[str], advice: str = "") -> None:
    if name not in supported:
        raise UnsupportedModel(f"architecture {name!r:.80} is not supported; supported: {', '.join(supported)}{advice}")
