"""Exchanges the weights of two drafts of the same kind and shape.

On a GPU the values are copied in place: captured CUDA graphs read the tensors of the draft that was loaded first. Elsewhere
the two models exchange their attributes, which takes no time and copies nothing.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import IncompatibleDraft
from paceline.kernels.formats.four_bit import FourBitWeight
from paceline.kernels.formats.layout import uses_gpu_kernels
from paceline.kernels.formats.linear import DenseWeight
from paceline.kernels.formats.packing import PackedWeight
from paceline.kernels.formats.quantized import QuantizedWeight
from paceline.models.decoder import DecoderModel, Layer
from paceline.models.heads import DistilledModel, DraftVocabulary, MedusaModel
from paceline.models.heads.block import BlockModel
from paceline.models.heads.eagle import EagleModel

AnyDraft = DecoderModel | EagleModel | MedusaModel | BlockModel
KINDS: dict[type[Any], str] = {
    EagleModel: "an EAGLE head",
    MedusaModel: "Medusa heads",
    BlockModel: "a block drafter",
    DistilledModel: "a distilled draft",
    DecoderModel: "a whole model",
}
_COMPUTED = ("cos", "sin", "rotary")
"""Tables that follow from the configuration, which is the same in the current and the new draft."""


def check_exchangeable(current: AnyDraft, other: AnyDraft) -> None:
    """Raise `IncompatibleDraft` with the first difference, unless the two drafts have the same kind, configuration, size of
    vocabulary and shapes."""
    if type(current) is not type(other):
        raise _difference("the kind", KINDS[type(current)], KINDS[type(other)])
    for name, mine, its in _settings(current, other):
        if mine != its:
            raise _difference(name, mine, its)
    mine, its = own_tensors(current), own_tensors(other)
    if missing := sorted(mine.keys() ^ its.keys()):
        has = ("present", "absent") if missing[0] in mine else ("absent", "present")
        raise _difference(missing[0], *has)
    for name, tensor in mine.items():
        if tensor.shape != its[name].shape or tensor.dtype is not its[name].dtype:
            raise _difference(name, _form(tensor), _form(its[name]))


def exchange(current: AnyDraft, other: AnyDraft) -> None:
    """Give each of two drafts the weights of the other. They have passed `check_exchangeable`."""
    if any(uses_gpu_kernels(tensor.device) for tensor in own_tensors(current).values()):
        exchange_in_place(current, other)
    else:
        current.__dict__, other.__dict__ = other.__dict__, current.__dict__


@torch.inference_mode()
def exchange_in_place(current: AnyDraft, other: AnyDraft) -> None:
    """The same by copying values, one tensor after another. The copies run in the current stream: steps that were submitted
    before read the old values, and later ones the new."""
    its = own_tensors(other)
    for name, mine in own_tensors(current).items():
        if mine.data_ptr() != its[name].data_ptr():  # otherwise the two drafts use the tensor of their target
            kept = mine.clone()
            mine.copy_(its[name])
            its[name].copy_(kept)


def own_tensors(model: AnyDraft) -> dict[str, Tensor]:
    """All tensors that a pass of the draft reads, by path. A tensor that two attributes share appears once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _tensors("", vars(model)):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _tensors(path: str, value: object) -> Iterator[tuple[str, Tensor]]:
    match value:
        case Tensor():
            yield path, value
        case DenseWeight():
            yield path, value.values
        case QuantizedWeight():
            yield f"{path}.values", value.values
            yield f"{path}.scales", value.scales
        case FourBitWeight():
            yield f"{path}.codes", value.codes
            yield f"{path}.words", value.words
        case PackedWeight():
            yield from ((f"{path}.{i}", tensor) for i, tensor in enumerate(value.tensors))
        case DraftVocabulary():
            yield from _tensors(f"{path}.head", value.head)
            yield from _tensors(f"{path}.ids", value.ids)
        case Layer():
            yield from _tensors(path, vars(value))
        case list() | tuple():
            for i, item in enumerate(value):
                yield from _tensors(f"{path}.{i}", item)
        case dict():
            for name, item in value.items():
                if not name.startswith("_") and name not in _COMPUTED:  # private: caches, and the checkpoint itself
                    yield from _tensors(f"{path}.{name}" if path else name, item)


def _settings(current: AnyDraft, other: AnyDraft) -> Iterator[tuple[str, object, object]]:
    """The name of everything that decides the computation in addition to the weights, with its values in the two drafts."""
    for field in fields(current.config):
        yield field.name, getattr(current.config, field.name), getattr(other.config, field.name)
    if not isinstance(current, MedusaModel) and not isinstance(other, MedusaModel):
        yield "the number format", current.dtype, other.dtype
    if not isinstance(current, DistilledModel | EagleModel | MedusaModel | BlockModel):
        return
    assert isinstance(other, DistilledModel | EagleModel | MedusaModel | BlockModel)
    sizes = [model.vocabulary.vocab_size if model.vocabulary.ids is None else len(model.vocabulary.ids)
             for model in (current, other)]  # fmt: skip
    yield "the number of tokens that it can propose", sizes[0], sizes[1]


def _form(tensor: Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def _difference(name: str, current: object, other: object) -> IncompatibleDraft:
    return IncompatibleDraft(
        f"{name} of the draft in use is {current}, that of the new one {other}: a draft is exchanged for one of the same kind "
        "and shape; use `paceline rollout`, or restart the server with the new `draft`"
    )
