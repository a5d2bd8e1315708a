"""Builds an engine from a configuration: loads the models, checks that they match, and calibrates the assembled engine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, WeightBits
from paceline.core.errors import InvalidConfig, UnsupportedModel
from paceline.core.timeline import phase
from paceline.engine.assembly import assemble
from paceline.engine.engine import Engine
from paceline.engine.hooks.hook import StepHook
from paceline.engine.sizing.calibration import measure_context, measure_passes
from paceline.engine.sizing.draft_calibration import measure_drafts
from paceline.engine.sizing.head_calibration import measure_head, measure_head_in_graphs
from paceline.engine.start.draft_gain import MIN_GAIN, measure_gain
from paceline.engine.start.kernel_cache import KernelCache
from paceline.engine.start.kernel_compilation import KernelCompilation
from paceline.kernels.cpu import native
from paceline.kernels.gpu_model import META, uses_gpu_kernels
from paceline.kernels.quantized import Quantization
from paceline.kernels.weights import Activations
from paceline.models.drafts.compatibility import check_compatible
from paceline.models.drafts.eagle import EagleModel, EagleRunner
from paceline.models.drafts.load import LoadedHead, find_draft, load_draft
from paceline.models.loading.hub import pick_draft
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import load_parallel
from paceline.models.runner import ModelRunner
from paceline.speculation.depth.goodput import GoodputDepth
from paceline.speculation.proposer import Proposer

logger = logging.getLogger(__name__)

CPU_ROWS, CPU_SEQUENCES, CPU_CONTEXT = 64, 8, 2048
"""Limits of the calibration on a CPU: rows of a pass, sequences with context, and tokens of context in all."""

Load = Callable[[str, torch.device, torch.dtype, Quantization | None, Activations], LoadedModel]
LoadRanks = Callable[[RankSpec], tuple[LoadedModel, Ranks]]


def build_engine(
    config: EngineConfig,
    pool: Callable[[LoadedModel], Proposer] | None = None,
    load: Load = load_model,
    hooks: Sequence[StepHook] = (),
    extra_proposers: Mapping[str, Proposer] | None = None,
    weights_id: str = "",
    load_ranks: LoadRanks = load_parallel,
) -> Engine:
    """`pool` makes the proposer `pool` for the loaded target: drafts from draft workers. `load` loads a target for one device;
    it may return before all weights have arrived. `hooks` listen to every step. `extra_proposers` join the built-in
    ones under their names. `weights_id` identifies the weights when blocks are exchanged with other processes.
    `load_ranks` loads a target for several ranks."""
    _check_draft(config)
    device = pick_device(config.device)
    dtype, quantization = pick_dtype(config.dtype, device), pick_quantization(config.quantization)
    if config.kernel_cache is not None:
        KernelCache(Path(config.kernel_cache)).use()
    if config.tensor_parallel_size > 1:
        target, ranks = load_ranks(
            RankSpec(config.model, config.tensor_parallel_size, device, dtype, quantization, config.activations)
        )
        try:
            draft = _load_draft(config, target)
            engine = assemble(config, target, draft, ranks, pool, hooks, extra_proposers, weights_id)
            calibrate(engine, config)
            return engine
        except BaseException:
            ranks.close()
            raise
    with KernelCompilation.start(config, device) as compilation:
        with phase("read weights") as reading:
            target = load(config.model, device, dtype, quantization, config.activations)
            reading.note = f"{target.model.weight_bytes / 1e9:.1f} GB"
        draft = _load_draft(config, target)
        engine = assemble(config, target, draft, None, pool, hooks, extra_proposers, weights_id)
        compilation.wait()
    if target.model.is_complete and device.type != "meta":
        with phase("calibrate"):
            calibrate(engine, config)
    return engine


def _load_draft(config: EngineConfig, target: LoadedModel) -> LoadedModel | LoadedHead | None:
    """The draft that the engine uses: None if the configuration selects none, or if an optional one would not pay."""
    name = draft_of(config)
    if name is None:
        return None
    with phase("read draft"):
        draft = load_second(name, config, target)
    if is_optional(config, target.model.device) and isinstance(draft, LoadedHead) and not _pays(target, draft):
        return None
    return draft


def draft_of(config: EngineConfig) -> str | None:
    """The draft that this configuration selects. A CPU may leave it out: see `is_optional`."""
    return pick_draft(config.draft, config.model)


def _check_draft(config: EngineConfig) -> None:
    """The draft exists. Checked before the weights of the target are read, which can take minutes."""
    name = draft_of(config)
    if name is None:
        return
    try:
        find_draft(name)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error}; or set `draft` to `none`, to decode without a draft model") from error


def is_optional(config: EngineConfig, device: torch.device) -> bool:
    """Whether the draft is used only if it measures faster than plain decoding at start."""
    return config.draft == "auto" and device.type == "cpu"


def _pays(target: LoadedModel, head: LoadedHead) -> bool:
    if not target.model.is_complete or not isinstance(head.model, EagleModel):
        return True  # the depth policy learns the costs
    with phase("measure draft") as measuring, native.single_threaded_torch():
        gain = measure_gain(target.model, head.model, WallClock())
        measuring.note = f"expected speed with {head.name}: {gain:.2f}x that of plain decoding"
    if gain < MIN_GAIN:
        logger.info("draft auto: %s would be %.2fx as fast as plain here, so it is not used", head.name, gain)
    return gain >= MIN_GAIN


def calibrate(engine: Engine, config: EngineConfig) -> None:
    """Measure passes for the depth policy. This overwrites the cache, so that it does nothing after the first request; the
    policy then learns the costs from steps."""
    depth = engine.speculator.depth
    if not isinstance(depth, GoodputDepth) or not config.speculation.enabled or engine.has_work or engine.num_steps:
        return
    with native.single_threaded_torch():
        count, most = engine.scheduler.max_num_seqs, engine.scheduler.max_batched_tokens
        most = min(4 * count, most)
        if engine.runner.device.type == "cpu":
            # A row costs the same in every larger pass, and the cache takes memory only where it is written
            passes = measure_passes(engine.runner, count, min(CPU_ROWS, most), engine.clock)
            per_token = measure_context(engine.runner, min(count, CPU_SEQUENCES), engine.clock, CPU_CONTEXT)
        else:
            passes = measure_passes(engine.runner, count, most, engine.clock)
            per_token = measure_context(engine.runner, count, engine.clock)
        depth.calibrate(passes, per_token)
        _calibrate_drafts(engine, depth)


def _calibrate_drafts(engine: Engine, depth: GoodputDepth) -> None:
    """Measure the drafts whose first samples in steps would mislead the policy: a draft model on a GPU, and a head."""
    proposers, count = engine.speculator.proposers, engine.scheduler.max_num_seqs
    if engine.graph is not None and "draft_model" in proposers:
        (runner,) = proposers["draft_model"].traits.runners
        costs = measure_drafts(cast(ModelRunner, runner), count, engine.clock)
        depth.calibrate_drafts("draft_model", costs.lines, costs.prefill_seconds)
    if "eagle" in proposers:
        head = cast(EagleRunner, proposers["eagle"].traits.runners[0])
        if engine.graph is None:
            lines = measure_head(proposers["eagle"], head.model, count, depth.max_depth, engine.clock)
            depth.calibrate_drafts("eagle", lines)
        elif "eagle" in engine.speculator.graph_methods:
            costs = measure_head_in_graphs(engine.graph.draft_seconds, head, count)
            depth.calibrate_drafts("eagle", costs.lines, costs.prefill_seconds)


def load_second(name: str, config: EngineConfig, target: LoadedModel) -> LoadedModel | LoadedHead:
    """The draft: one trained for the target, or another model with the same vocabulary."""
    folder = find_draft(name)
    if folder is not None:
        return load_draft(folder, target)
    model = target.model
    try:
        draft = load_model(name, model.device, model.dtype, pick_quantization(config.draft_quantization))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"the draft {name} cannot be used: {error}") from error
    check_compatible(target.tokenizer, draft.tokenizer)
    return draft


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == META.type:  # compiles kernels and computes nothing
        return META
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not index.isdecimal()):
        raise InvalidConfig(f"unknown device {name!r}: use auto, cpu, cuda, or one GPU of several, such as cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig("device cuda is set, but this torch sees no GPU: use device cpu, or a CUDA build of torch")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        raise InvalidConfig(f"device {name} is set, but the GPUs are cuda:0 to {torch.cuda.device_count() - 1}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if uses_gpu_kernels(device) else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def pick_quantization(name: WeightBits) -> Quantization | None:
    return None if name == "none" else name
