"""The description of a model as JSON: the form in which it is sent with weights."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paceline.core.errors import UnsupportedModel
from paceline.kernels.rope import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from paceline.models.families.fields import EXPERTS, LAYERS
from paceline.models.families.layers import (
    DenseFeedForward,
    Heads,
    Latent,
    LayerSpec,
    OwnHeads,
    QueryScale,
    Rotary,
    RoutedExperts,
)
from paceline.models.families.spec import DecoderSpec

_KINDS = {
    kind.__name__: kind
    for kind in (
        DecoderSpec, LayerSpec, Heads, Latent, OwnHeads, QueryScale, DenseFeedForward, RoutedExperts, Rotary,
        LinearScaling, Llama3Scaling, FrequencyFactors, YarnScaling,
    )
}  # fmt: skip


def spec_to_json(spec: DecoderSpec) -> str:
    """Layers that are alike are written once, and `order` says which of them each layer is."""
    kinds = tuple(dict.fromkeys(spec.layers))
    values = _plain(spec) | {"layers": _plain(kinds), "order": [kinds.index(layer) for layer in spec.layers]}
    return json.dumps(values)


def spec_from_json(text: str) -> DecoderSpec:
    try:
        values = json.loads(text)
        kinds, order = [_made(kind) for kind in values["layers"]], values.pop("order")
        if not 1 <= len(order) <= LAYERS or not all(0 <= number < len(kinds) for number in order):
            raise ValueError(f"{len(order)} layers of {len(kinds)} kinds")
        if any(isinstance(kind.ffn, RoutedExperts) and kind.ffn.num > EXPERTS for kind in kinds):
            raise ValueError(f"more than {EXPERTS} experts")
        spec = _made(values | {"layers": []}, layers=tuple(kinds[number] for number in order))
        if not isinstance(spec, DecoderSpec):
            raise TypeError(f"a {type(spec).__name__}")
        return spec
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"the model configuration cannot be read: {error!r:.200}") from None


def _plain(value: Any) -> Any:
    """The fields of a part with the name of its class, and lists of parts."""
    if type(value).__name__ in _KINDS:
        return {"kind": type(value).__name__} | {
            field.name: _plain(getattr(value, field.name)) for field in fields(value)
        }
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(value: Any, **given: Any) -> Any:
    """The inverse of `_plain`. `given` replaces fields of the outermost part."""
    if isinstance(value, Mapping):
        made = {name: _made(item) for name, item in value.items() if name != "kind"}
        return _KINDS[value["kind"]](**made | given)
    return tuple(_made(item) for item in value) if isinstance(value, list) else value
