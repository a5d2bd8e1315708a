"""Target and draft: are they there, do they go together, do they fit? No weights are read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch

from paceline.cli.check import Check
from paceline.core.config import EngineConfig
from paceline.core.errors import IncompatibleDraft, InvalidConfig, OutOfMemory, PacelineError
from paceline.core.machine import available_memory
from paceline.engine.build import fit_models, pick_device, pick_dtype, window_of
from paceline.engine.memory_fit import GIB, MemoryFit
from paceline.models.architectures.config import ModelConfig
from paceline.models.drafts.compatibility import check_compatible
from paceline.models.drafts.load import find_draft
from paceline.models.loading.hub import pick_draft
from paceline.models.loading.load import LoadedModel, open_checkpoint
from paceline.models.loading.weight_size import weight_bytes
from paceline.models.tokenizer.tokenizer import Tokenizer

LARGE_DRAFT = 0.5
"""A draft over this share of the target's size can hardly pay: its passes come one after the other."""


@dataclass(frozen=True, slots=True)
class _Weights:
    dtype: torch.dtype
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSketch:
    """As much of a `LoadedModel` as the memory's arithmetic looks at."""

    name: str
    config: ModelConfig
    model: _Weights
    tokenizer: Tokenizer


def check_models(config: EngineConfig) -> Iterator[Check]:
    try:
        device = pick_device(config.device)
    except InvalidConfig as error:
        yield Check.problem("device", str(error))
        return
    dtype = pick_dtype(config.dtype, device)
    target = draft = None
    try:
        target = sketch(config.model, device, dtype, config.quantization != "none")
        yield Check("target", _describe(target))
    except PacelineError as error:
        yield Check.problem("target", str(error))
    name = pick_draft(config.draft, config.model, device.type)
    if name is None:
        advice = "set --draft to a small model of the same family, or train one: paceline train"
        if device.type == "cpu":
            advice = "on a CPU a draft may pay or not: paceline advise --draft … measures it"
        yield Check.note("draft", "none: guesses come from the text so far (ngram)", advice)
    else:
        try:
            trained = find_draft(name)
            if trained is not None:
                if target is not None:
                    trained.check_target(target.config, target.tokenizer)
                yield Check("draft", f"{trained.name}: {trained.kind}, made for {trained.made_for}")
            else:
                draft = sketch(name, device, dtype, config.draft_quantization != "none")
                yield Check("draft", _describe(draft))
        except PacelineError as error:
            yield Check.problem("draft", str(error))
            return
    if target is None:
        return
    if draft is not None:
        yield from _check_pair(target, draft)
    yield from _check_memory(config, target, draft, device)


def sketch(name: str, device: torch.device, dtype: torch.dtype, quantize: bool = False) -> ModelSketch:
    checkpoint = open_checkpoint(name)
    weights = _Weights(dtype, weight_bytes(name, checkpoint, device, dtype, quantize))
    return ModelSketch(checkpoint.name, checkpoint.config, weights, checkpoint.read_tokenizer())


def _describe(model: ModelSketch) -> str:
    shape = model.config
    return (
        f"{model.name}: {shape.architecture}, {shape.num_parameters / 1e6:,.0f} million weights in about "
        f"{model.model.weight_bytes / GIB:.2f} GiB, window {shape.max_position}"
    )


def _check_pair(target: ModelSketch, draft: ModelSketch) -> Iterator[Check]:
    try:
        check_compatible(target.tokenizer, draft.tokenizer)
    except IncompatibleDraft as error:
        yield Check.problem("pair", str(error))
        return
    share = draft.config.num_parameters / target.config.num_parameters
    if share > LARGE_DRAFT:
        yield Check.note(
            "pair",
            f"compatible, but the draft has {share:.0%} of the target's weights",
            "take a smaller draft: guessing must be several times cheaper than checking",
        )
    else:
        yield Check("pair", f"compatible: same tokens, same ends of turn; the draft is {1 / share:.1f} times smaller")


def _check_memory(
    config: EngineConfig, target: ModelSketch, draft: ModelSketch | None, device: torch.device
) -> Iterator[Check]:
    window = window_of(config, target.config)
    try:
        fit = fit_models(config, cast(LoadedModel, target), cast("LoadedModel | None", draft), device, window)
    except (OutOfMemory, InvalidConfig) as error:
        yield Check.problem("fit", str(error))
        return
    yield Check("fit", _figures(fit, window))
    needed, free = fit.budget_bytes - fit.free_bytes, available_memory()
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    if free is not None and needed > free:
        yield Check.problem(
            "free memory",
            f"{needed / GIB:.2f} GiB are needed and {free / GIB:.2f} GiB are free now",
            "close other programs, or set kv_tokens or max_model_len lower",
        )


def _figures(fit: MemoryFit, window: int) -> str:
    return (
        f"weights {fit.weight_bytes / GIB:.2f} + activations {fit.activation_bytes / GIB:.2f} + caches "
        f"{fit.kv_bytes / GIB:.2f} GiB out of {fit.budget_bytes / GIB:.2f}; the caches hold {fit.kv_tokens} tokens, "
        f"{fit.kv_tokens / window:.1f} sequences of {window}"
    )
