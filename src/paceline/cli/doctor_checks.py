"""The checks of `paceline doctor`. No weights are loaded."""

import os
import platform
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import cast

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import IncompatibleDraft, InvalidConfig, OutOfMemory, PacelineError
from paceline.core.machine import GIB, available_memory, cpu_name, total_memory, usable_cores
from paceline.engine.sizing import MemoryFit, size_engine
from paceline.engine.start import is_optional, pick_device, pick_dtype
from paceline.kernels.cpu import native
from paceline.model_files.hub import PREFIX, pick_draft
from paceline.model_files.tokenizer import Tokenizer, check_compatible
from paceline.models.drafts import DraftFolder, check_draft, find_draft
from paceline.models.families.spec import DecoderSpec
from paceline.models.loading import LoadedModel, open_checkpoint, weight_bytes


class CheckResult(Enum):
    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report: what was checked, what was found, and what to change."""

    name: str
    found: str
    verdict: CheckResult = CheckResult.GOOD
    advice: str = ""

    @classmethod
    def note(cls, name: str, found: str, advice: str) -> "Check":
        """Works, but could be better."""
        return cls(name, found, CheckResult.NOTE, advice)

    @classmethod
    def problem(cls, name: str, found: str, advice: str = "") -> "Check":
        """Does not work as configured."""
        return cls(name, found, CheckResult.PROBLEM, advice)


VERSIONS = ("paceline", "torch", "numpy", "safetensors", "tokenizers")
EXTRAS = {
    "jinja2": ("chat", "chat templates"),
    "llguidance": ("grammar", "JSON schemas"),
    "huggingface_hub": ("hub", "models by their Hugging Face id"),
    "gguf": ("gguf", "GGUF files with types below 4 bits"),
    "fastapi": ("server", "the server"),
    "uvicorn": ("server", "the server"),
    "prometheus_client": ("server", "metrics"),
    "yaml": ("server", "configuration files"),
    "httpx": ("endpoints", "other engines, bench --against"),
    "matplotlib": ("bench", "bench --plot"),
    "scipy": ("bench", "audit --verification rejection"),
    "zmq": ("pool", "clusters"),
    "msgspec": ("pool", "clusters"),
    "opentelemetry.exporter.otlp.proto.http": ("trace", "traces"),
}
"""Maps each module to the extra that installs it and the feature that needs it."""


def check_machine() -> Iterator[Check]:
    yield Check("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}")
    yield Check("versions", ", ".join(f"{name} {_version(name)}" for name in VERSIONS))
    yield _processor()
    yield Check("memory", f"{_gib(total_memory())}{_available()}")
    yield _gpu()
    yield _kernels()
    yield _extras()


def _processor() -> Check:
    usable, present = usable_cores(), os.cpu_count() or 1
    cores = f"{usable} cores" if usable == present else f"{usable} of {present} cores"
    return Check("processor", f"{cpu_name()}, {cores}")


def _gpu() -> Check:
    if torch.cuda.is_available():
        names = []
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            names.append(f"{torch.cuda.get_device_name(i)}, {_gib(free)} of {_gib(total)} free")
        return Check("GPU", "; ".join(names))
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        return Check.note(
            "GPU",
            "nvidia-smi is installed, but this torch is a CPU build",
            "install a CUDA build of torch: pip install torch --index-url https://download.pytorch.org/whl/cu128",
        )
    return Check("GPU", "none usable by torch; models run on the CPU")


def _kernels() -> Check:
    if os.environ.get("PACELINE_NATIVE", "1") == "0":
        return Check.note("CPU kernels", "disabled by PACELINE_NATIVE=0", "unset it: decoding is several times faster")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if native.available():
            return Check("CPU kernels", "compiled for this processor; logits are bitwise the same in any batch")
    if torch.cuda.is_available():
        return Check("CPU kernels", "not available, and not needed on a GPU")
    # NOTE: the warning is issued once per process; a later call has no reason to show.
    reason = str(caught[0].message) if caught else "install a C compiler: apt install gcc, or pip install ziglang"
    return Check.note("CPU kernels", "not available: decoding is correct but several times slower", reason)


def _extras() -> Check:
    missing = [module for module in EXTRAS if not _is_installed(module)]
    if not missing:
        return Check("optional packages", "all installed")
    lacking = ", ".join(f"{module} ({EXTRAS[module][1]})" for module in missing)
    extras = ",".join(dict.fromkeys(EXTRAS[module][0] for module in missing))
    return Check.note("optional packages", f"missing: {lacking}", f"pip install 'paceline[{extras}]'")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is not installed
        return False


def _available() -> str:
    available = available_memory()
    return "" if available is None else f", {_gib(available)} available"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


LARGE_DRAFT = 0.5
"""Largest useful size of a draft relative to the target, because the draft's passes run in sequence."""


@dataclass(frozen=True, slots=True)
class _Weights:
    dtype: torch.dtype
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelSketch:
    """The fields of a `LoadedModel` that the memory calculation reads."""

    name: str
    config: DecoderSpec
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
        yield Check("target", describe(target))
    except PacelineError as error:
        yield Check.problem("target", str(error))
    name = pick_draft(config.draft, config.model)
    if name is None:
        advice = "set --draft to a small model of the same family, or train one: paceline train"
        if device.type == "cpu":
            advice = "on a CPU, measure whether a draft is faster: paceline advise --draft …"
        yield Check.note("draft", "none: drafts come from the text so far (ngram)", advice)
    else:
        try:
            trained = find_draft(name)
            if trained is not None:
                condition = ", if it is faster than plain at start" if is_optional(config, device) else ""
                what = trained.kind if target is None else describe_draft(trained, config.model, target)
                yield Check("draft", f"{trained.name}: {what}, trained for {trained.target_name}{condition}")
            else:
                draft = sketch(name, device, dtype, config.draft_quantization != "none")
                yield Check("draft", describe(draft))
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


def describe(model: ModelSketch) -> str:
    """Name, architecture, size and window of a model."""
    shape = model.config
    return (
        f"{model.name}: {shape.architecture}, {shape.num_parameters / 1e6:,.0f} million weights, about "
        f"{model.model.weight_bytes / GIB:.2f} GiB, window {shape.max_position}"
    )


def describe_draft(folder: DraftFolder, name: str, target: ModelSketch) -> str:
    """What a trained draft is and what it costs. Raises `UnsupportedModel` or `IncompatibleDraft` unless it fits the target
    called `name`."""
    shape = target.config
    if name.startswith(PREFIX):  # it computes with the width of its base
        shape = replace(shape, hidden_size=folder.hidden_size or shape.hidden_size)
    head = check_draft(folder, shape, target.tokenizer)
    if head is None:
        return f"{folder.kind}, {folder.weights.file_bytes / GIB:.2f} GiB of files"
    return f"{head.summary}, {head.cost(target.model.dtype.itemsize)}"


def _check_pair(target: ModelSketch, draft: ModelSketch) -> Iterator[Check]:
    try:
        warning = check_compatible(target.tokenizer, draft.tokenizer)
    except IncompatibleDraft as error:
        yield Check.problem("pair", str(error))
        return
    if warning is not None:
        yield Check.note("pair", "compatible, with differences", warning)
    share = draft.config.num_parameters / target.config.num_parameters
    if share > LARGE_DRAFT:
        yield Check.note(
            "pair",
            f"compatible, but the draft has {share:.0%} of the target's weights",
            "use a smaller draft: drafting must be several times cheaper than verifying",
        )
    else:
        yield Check(
            "pair", f"compatible: the draft can propose the target's tokens; it is {1 / share:.1f} times smaller"
        )


def _check_memory(
    config: EngineConfig, target: ModelSketch, draft: ModelSketch | None, device: torch.device
) -> Iterator[Check]:
    try:
        sizing = size_engine(config, cast(LoadedModel, target), cast("LoadedModel | None", draft), device)
    except (OutOfMemory, InvalidConfig) as error:
        yield Check.problem("fit", str(error))
        return
    fit = sizing.memory
    yield Check("limits", sizing.description)
    yield Check("fit", _figures(fit, sizing.window))
    needed, free = fit.budget_bytes - fit.free_bytes, available_memory()
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
    if free is not None and needed > free:
        yield Check.problem(
            "free memory",
            f"{needed / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free now",
            "close other programs, or lower kv_tokens or max_model_len",
        )


def _figures(fit: MemoryFit, window: int) -> str:
    return (
        f"weights {fit.weight_bytes / GIB:.2f} + activations {fit.activation_bytes / GIB:.2f} + caches "
        f"{fit.kv_bytes / GIB:.2f} GiB of {fit.budget_bytes / GIB:.2f}; the caches hold {fit.kv_tokens} tokens, "
        f"{fit.kv_tokens / window:.1f} sequences of {window}"
    )
