"""Reads the description of an EAGLE head from its config.json and the names of its weights, in each form that is published.

The forms number the target's hidden states differently. `EagleConfig` counts as `DecoderModel.forward` does: i is the state
after i layers. SpecForge, SGLang and DeepSpec write the number of a layer, whose output is state i + 1.
"""

import re
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.model_files import Metadata
from paceline.models.draft_files import DraftForm, FileWeights, NamedWeights, check_shapes, name_weights
from paceline.models.families.flat import flat_spec
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads import read_layers, table_shapes
from paceline.models.heads.eagle.eagle_weights import EagleConfig, StateNorm

_OLD_NAMES = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_MODEL_OPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}
"""Keys that some tools write into `eagle_config`, and their value in a head whose layers are those of EAGLE-3."""


def read_eagle(
    source: str, form: DraftForm, config: Mapping[str, Any], stored: FileWeights, target: DecoderSpec
) -> tuple[EagleConfig, NamedWeights]:
    """The description of the head `source` and its weights under the names of `EagleConfig.tensors`. No weight is read but the
    vocabulary map. Raises `UnsupportedModel` for a head that cannot be used, and `IncompatibleDraft` for another target's."""
    fields = Metadata(f"config.json of {source}", config)
    unused = ("embed_tokens.weight", "lm_head.weight") if form == "eagle1" else ()
    weights = name_weights(source, stored, _Names(form), unused)
    match form:
        case "paceline":
            shape = _paceline(fields, target)
        case "speculators":
            shape = _speculators(fields, weights, target)
        case "sglang":
            shape = _sglang(fields, read_layers(config, weights, target), target)
        case "deepspec":
            shape = _deepspec(fields, read_layers(config, weights, target))
        case "eagle3":
            shape = EagleConfig(_default_layers(target), read_layers(config, weights, target), _state_size(fields))
        case _:
            shape = _eagle1(fields, read_layers(config, weights, target), target)
    missing = [layer for layer in shape.state_layers if not 0 <= layer <= target.num_layers]
    if missing:
        raise UnsupportedModel(
            f"{source} needs states after layers {shape.state_layers}; the target has {target.num_layers} layers"
        )
    if form == "sglang" and "lm_head.weight" not in weights.names() and fields.flag("tie_word_embeddings", False):
        weights = _tied(source, weights, target)
    tables = table_shapes(source, shape.hidden_size, shape.state_size, weights, target)
    check_shapes(source, weights, shape.tensors() | tables)
    return shape, weights


class _Names:
    """Renames weights of a form to those of speculators."""

    def __init__(self, form: DraftForm) -> None:
        self._form = form

    def __call__(self, name: str) -> str:
        name = name.removeprefix("model.")
        if self._form in ("sglang", "eagle3", "deepspec"):
            name = re.sub(r"^midlayer\.", "layers.0.", name)
        if self._form == "sglang":
            for old, new in _OLD_NAMES.items():
                name = name.replace(old, new)
            # In SGLang a later layer calls its input norm so
            name = re.sub(r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm.", name)
        return name


def _paceline(fields: Metadata, target: DecoderSpec) -> EagleConfig:
    decoder = flat_spec(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=fields.count("hidden_size", 1 << 20),
        num_layers=1,
        num_heads=fields.count("num_heads", 4096),
        num_kv_heads=fields.count("num_kv_heads", 4096),
        head_dim=fields.count("head_dim", 4096, least=2),
        ffn_size=fields.count("ffn_size", 1 << 20),
        rms_eps=fields.number("rms_eps", 0.0, 1.0),
        rope_theta=fields.number("rope_theta", 1.0, 1e12),
        max_position=target.max_position,
        rope_scaling=target.rotary[0].scaling,
    )
    return EagleConfig(fields.token_ids("capture"), decoder, decoder.hidden_size)


def _speculators(fields: Metadata, weights: NamedWeights, target: DecoderSpec) -> EagleConfig:
    if "norm_before_residual" not in fields:
        raise UnsupportedModel(
            "config.json lacks norm_before_residual: both values are in use, add the one the head was trained with"
        )
    fields.section("transformer_layer_config")  # refuses a value of another type
    decoder = read_layers(fields.raw("transformer_layer_config") or {}, weights, target)
    return EagleConfig(
        fields.token_ids("eagle_aux_hidden_state_layer_ids") or _default_layers(target),
        decoder,
        fields.count("target_hidden_size", 1 << 20, decoder.hidden_size),
        state_norm=_state_norm(fields.flag("fc_norm", False), fields.flag("norm_before_fc", False)),
        norm_before_residual=fields.flag("norm_before_residual", False),
        norm_output=fields.flag("norm_output", False),
    )


def _sglang(fields: Metadata, decoder: DecoderSpec, target: DecoderSpec) -> EagleConfig:
    nested, numbers = fields.section("eagle_config"), "eagle_aux_hidden_state_layer_ids"
    if numbers in fields:
        raise UnsupportedModel(
            f"config.json has {numbers} outside eagle_config, where some engines count from the embedding and others from "
            "layer 0: move it into eagle_config, as numbers of layers"
        )
    for key, value in _MODEL_OPT.items():
        if nested.flag(key, value) is not value:
            raise UnsupportedModel(f"config.json has {key}={not value} in eagle_config, which is not supported")
    return EagleConfig(
        tuple(layer + 1 for layer in nested.token_ids(numbers)) or _default_layers(target),
        decoder,
        _state_size(fields),
        state_norm=_state_norm(
            _flag(fields, nested, "fc_norm") or _flag(fields, nested, "use_aux_norm"),
            _flag(fields, nested, "norm_before_fc"),
        ),
        norm_output=_flag(fields, nested, "norm_output"),
    )


def _deepspec(fields: Metadata, decoder: DecoderSpec) -> EagleConfig:
    numbers = fields.array("target_layer_ids", int)
    return EagleConfig(tuple(layer + 1 for layer in numbers), decoder, _state_size(fields))  # -1 is the embedding


def _eagle1(fields: Metadata, decoder: DecoderSpec, target: DecoderSpec) -> EagleConfig:
    last, has_bias = (target.num_layers,), fields.flag("bias", True)
    return EagleConfig(last, decoder, decoder.hidden_size, 1, state_norm="final", has_fc_bias=has_bias)


def _default_layers(target: DecoderSpec) -> tuple[int, ...]:
    """The states of a head that names none."""
    return 2, target.num_layers // 2, target.num_layers - 3


def _state_size(fields: Metadata) -> int:
    return fields.count("target_hidden_size", 1 << 20, fields.count("hidden_size", 1 << 20))


def _state_norm(each: bool, joined: bool) -> StateNorm:
    if each and joined:
        raise UnsupportedModel("config.json has fc_norm and norm_before_fc, which exclude each other: remove one")
    return "each" if each else "joined" if joined else "none"


def _flag(fields: Metadata, nested: Metadata, name: str) -> bool:
    """A flag that is at the top level or in `eagle_config`."""
    if name in fields and name in nested and fields.raw(name) != nested.raw(name):
        raise UnsupportedModel(f"config.json has two values of {name}, at the top and in eagle_config: remove one")
    return nested.flag(name, False) if name in nested else fields.flag(name, False)


def _tied(source: str, weights: NamedWeights, target: DecoderSpec) -> NamedWeights:
    """The weights with the head's embedding as its output matrix too."""
    if "embed_tokens.weight" in weights.names():
        return NamedWeights(
            weights.stored, {**weights.stored_names, "lm_head.weight": weights.stored_names["embed_tokens.weight"]}
        )
    if not target.tie_embeddings:
        raise UnsupportedModel(f"{source} has tie_word_embeddings and neither lm_head.weight nor embed_tokens.weight")
    return weights
