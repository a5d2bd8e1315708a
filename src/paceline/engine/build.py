"""Builds an engine from a configuration: loads the models, checks that they match and fit, and assembles the parts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from paceline.core.clock import WallClock
from paceline.core.config import EngineConfig, SpeculationConfig, WeightBits
from paceline.core.errors import InvalidConfig, UnsupportedModel
from paceline.core.timeline import phase
from paceline.engine.engine import Engine
from paceline.engine.hooks.hook import StepHook
from paceline.engine.hooks.tier_build import make_tiers
from paceline.engine.proposers import make_proposers
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizing.calibration import measure_context, measure_passes
from paceline.engine.sizing.draft_calibration import measure_drafts
from paceline.engine.sizing.sizing import size_engine
from paceline.engine.speculator import Speculator
from paceline.engine.start.draft_gain import MIN_GAIN, measure_gain
from paceline.engine.start.kernel_cache import KernelCache
from paceline.engine.start.kernel_compilation import KernelCompilation
from paceline.engine.validator import Limits, RequestValidator
from paceline.kernels.cpu import native
from paceline.kernels.gpu_model import META, uses_gpu_kernels
from paceline.kernels.quantized import Quantization
from paceline.kernels.weights import Activations
from paceline.kv.block_tables import BlockTables
from paceline.models.drafts.compatibility import check_compatible
from paceline.models.drafts.eagle import EagleModel
from paceline.models.drafts.load import LoadedHead, find_draft, load_draft
from paceline.models.loading.hub import pick_draft
from paceline.models.loading.load import LoadedModel, load_model
from paceline.models.parallel.commands import RankSpec
from paceline.models.parallel.ranks import Ranks
from paceline.models.parallel.runner import ParallelRunner, load_parallel
from paceline.models.runner import ModelRunner
from paceline.models.runners import make_runner
from paceline.speculation.depth.goodput import GoodputDepth
from paceline.speculation.depth.padded_batch import PaddedBatch
from paceline.speculation.depth_rule import make_breaker, make_depth
from paceline.speculation.proposer import Proposer

if TYPE_CHECKING:
    from paceline.engine.executors.graph.drafters.drafter import GraphProposer

logger = logging.getLogger(__name__)

DRAFT_METHODS = {"eagle": "an EAGLE head", "draft_model": "a draft model", "medusa": "Medusa heads"}
"""Methods that need `draft`; the first available one is the default."""
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
            engine = _assemble(config, target, ranks, pool, hooks, extra_proposers, weights_id)
            calibrate(engine, config)
            return engine
        except BaseException:
            ranks.close()
            raise
    with KernelCompilation.start(config, device) as compilation:
        with phase("read weights") as reading:
            target = load(config.model, device, dtype, quantization, config.activations)
            reading.note = f"{target.model.weight_bytes / 1e9:.1f} GB"
        engine = _assemble(config, target, None, pool, hooks, extra_proposers, weights_id)
        compilation.wait()
    if target.model.is_complete and device.type != "meta":
        with phase("calibrate"):
            calibrate(engine, config)
    return engine


def _assemble(
    config: EngineConfig,
    target: LoadedModel,
    ranks: Ranks | None,
    pool: Callable[[LoadedModel], Proposer] | None,
    hooks: Sequence[StepHook],
    extra_proposers: Mapping[str, Proposer] | None,
    weights_id: str = "",
) -> Engine:
    device = target.model.device
    name = draft_of(config)
    draft = None
    if name is not None:
        with phase("read draft"):
            draft = load_second(name, config, target)
    if is_optional(config, device) and isinstance(draft, LoadedHead) and not _pays(target, draft):
        draft = None
    sizing = size_engine(config, target, draft, device)
    window, limits, fit = sizing.window, sizing.limits, sizing.memory
    if config.max_model_len is not None and window < config.max_model_len:
        logger.warning("max_model_len is %d, but the model supports %d: using that", config.max_model_len, window)
    logger.info("%s, sequences of up to %d", sizing.description, window)
    clock = WallClock()
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else None
    if ranks is None:
        runner = make_runner(target.model, fit.num_blocks, kv_dtype, weights_id)
    else:
        runner = ParallelRunner(target.model, fit.num_blocks, ranks, kv_dtype, weights_id)
    tables = BlockTables(fit.num_blocks, config.prefix_caching)
    proposers = make_proposers(config, limits, target, draft, runner, tables, kv_dtype)
    if pool is not None:
        proposers["pool"] = pool(target)
    proposers.update(extra_proposers or {})
    method = pick_method(config.speculation, proposers)
    validator = RequestValidator(
        Limits(target.config.vocab_size, window, limits.max_depth),
        config.speculation.verification,
        method,
        proposers,
        target.tokenizer,
    )
    has_graphs = uses_gpu_kernels(device) and ranks is None
    in_graph = graph_proposer(proposers) if has_graphs else None
    graph_methods = frozenset(name for name, proposer in proposers.items() if proposer is in_graph)
    padded = (
        padded_batches(in_graph, graph_methods, frozenset(proposers), limits.max_draft_tokens) if has_graphs else ()
    )
    speculator = Speculator(
        proposers,
        make_depth(config.speculation, limits.max_depth, padded),
        make_breaker(config.speculation),
        validator,
        clock,
        target.config.vocab_size,
        config.speculation.enabled,
        graph_methods,
    )
    tiers = make_tiers(config, runner, tables, clock, window)
    scheduler = Scheduler(tables, limits.max_num_seqs, limits.max_batched_tokens, tiers, limits.max_draft_tokens)
    graph = None
    if has_graphs:
        from paceline.engine.executors.graph.executor import GraphExecutor
        from paceline.models.gpu.runner import GpuRunner

        assert isinstance(runner, GpuRunner)
        graph = GraphExecutor(runner, in_graph, scheduler, speculator, validator, limits.max_depth, clock)
    return Engine(
        runner,
        scheduler,
        speculator,
        validator,
        tokenizer=target.tokenizer,
        clock=clock,
        graph=graph,
        hooks=hooks,
        audit_fraction=config.audit_fraction,
        memory=fit,
        default_methods=default_methods(config.speculation, proposers),
    )


def graph_proposer(proposers: Mapping[str, Proposer]) -> "GraphProposer | None":
    """The proposer that drafts inside graph steps: the first that can."""
    for proposer in proposers.values():
        if proposer.traits.can_run_in_graph:
            return cast("GraphProposer", proposer)
    return None


def padded_batches(
    proposer: "GraphProposer | None", in_graph: frozenset[str], methods: frozenset[str], max_draft_tokens: int
) -> tuple[PaddedBatch, PaddedBatch]:
    """How many rows a graph step has, and how many a pass with drafts that are made on the host."""
    from paceline.engine.executors.graph.batch import draft_shape
    from paceline.models.cuda_graph import MAX_GRAPH_ROWS
    from paceline.models.gpu.runner import bucket

    return (
        PaddedBatch(in_graph, bucket, lambda depth: draft_shape(proposer, depth).nodes, max_draft_tokens),
        PaddedBatch(methods - in_graph, bucket, lambda depth: bucket(1 + depth) - 1, MAX_GRAPH_ROWS // 2),
    )


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
        draft = engine.speculator.proposers.get("draft_model")
        if engine.graph is not None and draft is not None:
            (runner,) = draft.traits.runners
            costs = measure_drafts(cast(ModelRunner, runner), count, engine.clock)
            depth.calibrate_drafts("draft_model", costs.lines, costs.prefill_seconds)


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


def default_methods(config: SpeculationConfig, proposers: Mapping[str, Proposer]) -> tuple[str, ...]:
    """The pool and the in-engine draft, if the engine has both and the configuration names no method."""
    drafts = [name for name in DRAFT_METHODS if name in proposers]
    if config.method is not None or "pool" not in proposers or not drafts:
        return ()
    return "pool", drafts[0]


def pick_method(config: SpeculationConfig, proposers: dict[str, Proposer]) -> str:
    if config.method is None:
        return next((name for name in ("pool", *DRAFT_METHODS) if name in proposers), "ngram")
    if config.method not in proposers:
        draft = DRAFT_METHODS.get(config.method)
        needs = f" (it needs {draft}: set `draft`)" if draft else ""
        raise InvalidConfig(
            f"speculation.method {config.method!r} is not available{needs}; choose from: {', '.join(sorted(proposers))}"
        )
    return config.method
