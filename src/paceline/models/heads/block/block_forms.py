"""Reads the description of a block drafter from its config.json and the names of its weights, in each form that is published.

Two things load without an error if they are taken for the other and halve acceptance: the number of a hidden state, and the
layout of the block. DFlash predicts the token at a row's own position, DSpark the next one. The form decides both, and where a
form leaves one open, the key that decides it is required.
"""

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.model_files import Metadata
from paceline.models.draft_files import DraftForm, FileWeights, NamedWeights, check_shapes, name_weights
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads import draft_ids, read_layers, table_shapes
from paceline.models.heads.block.block_weights import MAX_BLOCK, BlockConfig, Markov

_KINDS: Mapping[str, Markov] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
_CONFIDENCE = "confidence_head.proj"
"""Beginning of the weights that predict acceptance. Depth rules measure it, so nothing reads them."""


def read_block(
    source: str, form: DraftForm, config: Mapping[str, Any], stored: FileWeights, target: DecoderSpec
) -> tuple[BlockConfig, NamedWeights]:
    """The description of the drafter `source` and its weights under the names of `BlockConfig.tensors`. No weight is read but
    the vocabulary map. Raises `UnsupportedModel` for a drafter that cannot be used, and `IncompatibleDraft` for another
    target's."""
    fields = Metadata(f"config.json of {source}", config)
    unused = (f"{_CONFIDENCE}.weight", f"{_CONFIDENCE}.bias")
    weights = name_weights(source, stored, lambda name: name.removeprefix("model."), unused)
    nested = fields.section("dflash_config")
    layers = config
    if form.startswith("speculators"):
        fields.section("transformer_layer_config")  # refuses a value of another type
        layers = fields.raw("transformer_layer_config") or {}
    markov, rank = _markov(fields, nested, form)
    shape = BlockConfig(
        _states(fields, nested, form, target),
        read_layers(layers, weights, target),
        _either(fields, nested, "block_size").count("block_size", MAX_BLOCK, least=2),
        _either(fields, nested, "mask_token_id").count("mask_token_id", target.vocab_size - 1, least=0),
        _predicts_next(fields, form),
        markov,
        rank,
    )
    missing = [layer for layer in shape.state_layers if not 0 <= layer <= target.num_layers]
    if missing:
        raise UnsupportedModel(
            f"{source} needs states after layers {shape.state_layers}; the target has {target.num_layers} layers"
        )
    tables = table_shapes(source, shape.hidden_size, shape.state_size, weights, target)
    ids = draft_ids(weights, target.vocab_size)
    check_shapes(
        source, weights, shape.tensors(target.vocab_size, target.vocab_size if ids is None else len(ids)) | tables
    )
    return shape, weights


def _either(fields: Metadata, nested: Metadata, name: str) -> Metadata:
    """The part of config.json that has the key: the top level or `dflash_config`."""
    if name in fields and name in nested and fields.raw(name) != nested.raw(name):
        raise UnsupportedModel(f"config.json has two values of {name}, at the top and in dflash_config: remove one")
    return nested if name in nested else fields


def _states(fields: Metadata, nested: Metadata, form: DraftForm, target: DecoderSpec) -> tuple[int, ...]:
    if form.startswith("speculators"):
        numbers = fields.array("aux_hidden_state_layer_ids", int)
        return tuple(numbers)
    numbers = _either(fields, nested, "target_layer_ids").array("target_layer_ids", int)
    return tuple(layer + 1 for layer in numbers)  # -1 is the embedding


def _predicts_next(fields: Metadata, form: DraftForm) -> bool:
    if not form.startswith("speculators"):
        return form == "dspark"
    if "sample_from_anchor" not in fields:
        raise UnsupportedModel(
            "config.json lacks sample_from_anchor: engines read its absence differently, add the value that the drafter was "
            "trained with"
        )
    return fields.flag("sample_from_anchor", False)


def _markov(fields: Metadata, nested: Metadata, form: DraftForm) -> tuple[Markov, int]:
    """Kind and rank of the Markov head."""
    if form in ("dflash", "speculators_dflash"):
        return "none", 0
    rank = _either(fields, nested, "markov_rank").count("markov_rank", 1 << 16, least=0)
    if not rank:
        return "none", 0
    kind = _either(fields, nested, "markov_head_type").text("markov_head_type")
    if kind == "rnn" and not _predicts_next(fields, form):
        raise UnsupportedModel(
            "config.json has markov_head_type=rnn without sample_from_anchor, which is not supported"
        )
    if kind not in _KINDS:
        raise UnsupportedModel(
            f"config.json has markov_head_type={kind[:40]!r}, which is not supported; supported: {', '.join(_KINDS)}"
        )
    return _KINDS[kind], rank
