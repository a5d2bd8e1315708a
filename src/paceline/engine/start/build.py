"""Builds an engine from a configuration: loads the models, checks that they match, and calibrates the assembled engine.

`assemble` makes the parts of an engine from loaded models: sizes, runner, proposers, validator, speculator, scheduler and graph
executor.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from paceline.core.clock import Clock, WallClock
from paceline.core.config import EngineConfig, WeightBits
from paceline.core.errors import InvalidConfig, UnsupportedModel
from paceline.core.machine import phase
from paceline.engine import Engine, Scheduler, Speculator, StepHook, make_tiers
from paceline.engine.audit import SelfAudit
from paceline.engine.hooks import DefaultMethodTrial, KvExports, KvImports
from paceline.engine.sizing import (
    MIN_GAIN,
    ResolvedLimits,
    Sizing,
    calibrate,
    measure_gain,
    size_engine,
)
from paceline.engine.start.compile import KernelCache, KernelCompilation
from paceline.engine.start.proposers import default_methods, make_proposers, pick_method
from paceline.kernels.cpu import native
from paceline.kernels.formats.layout import META, uses_gpu_kernels
from paceline.kernels.formats.quantized import Quantization
from paceline.kernels.formats.weights import Activations
from paceline.kv import BlockTables
from paceline.model_files import CHECKSUM_DIGITS, SystemFingerprint
from paceline.model_files.hub import pick_draft
from paceline.model_files.tokenizer import Tokenizer, check_compatible, check_pair, fingerprint
from paceline.models import make_runner
from paceline.models.drafts import LoadedHead, find_draft, load_draft
from paceline.models.heads.eagle import EagleModel
from paceline.models.loading import LoadedModel, load_model
from paceline.models.manifest.manifest import check_replaceable
from paceline.models.parallel import Ranks, RankSpec, load_parallel
from paceline.models.runner import ModelRunner
from paceline.policy.depth.allocation import PaddedBatch
from paceline.policy.depth.rules import make_breaker, make_depth
from paceline.policy.step import DEFAULT_OBJECTIVES, Objectives, padded_size
from paceline.requests import Limits, RequestValidator
from paceline.speculation import Proposer

if TYPE_CHECKING:
    from paceline.engine.graph import GraphExecutor, GraphProposer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphDrafting:
    """Which proposer drafts inside graph steps, and the sizes of passes on a GPU."""

    proposer: "GraphProposer | None" = None
    methods: frozenset[str] = frozenset()
    """Methods of that proposer."""
    padded: tuple[PaddedBatch, ...] = ()
    """Rows of graph steps and of passes with drafts of the host. It is empty if passes are not padded."""


def assemble(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    ranks: Ranks | None = None,
    pool: Callable[[LoadedModel], Proposer] | None = None,
    hooks: Sequence[StepHook] = (),
    extra_proposers: Mapping[str, Proposer] | None = None,
) -> Engine:
    """An engine that is complete and not calibrated. `ranks` are the ranks of a target that is split. `build_engine` describes
    the remaining parameters. Raises `OutOfMemory` if the models do not fit."""
    sizing = size_engine(config, target, draft, target.model.device)
    _log_sizes(config, sizing)
    system_fingerprint = fingerprint_of(config, target)
    logger.info("system fingerprint %s", system_fingerprint)
    limits, num_blocks, clock = sizing.limits, sizing.memory.num_blocks, WallClock()
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else None
    runner = make_runner(target.model, num_blocks, kv_dtype, system_fingerprint.weights_id, ranks)
    tables = BlockTables(num_blocks, config.prefix_caching)
    proposers = make_proposers(config, limits, target, draft, runner, tables, kv_dtype)
    if pool is not None:
        proposers["pool"] = pool(target)
    proposers.update(extra_proposers or {})
    validator = _make_validator(config, target, sizing, proposers)
    has_graphs = uses_gpu_kernels(target.model.device)
    drafting = _graph_drafting(proposers, limits.max_draft_tokens) if has_graphs else GraphDrafting()
    speculator = _make_speculator(config, target, limits, proposers, drafting, validator, clock)
    tiers = make_tiers(config, runner, tables, clock, sizing.window)
    scheduler = Scheduler(tables, limits.max_num_seqs, limits.max_batched_tokens, tiers, limits.max_draft_tokens)
    graph = None
    if has_graphs:
        graph = _make_graph_executor(runner, drafting, scheduler, speculator, validator, limits, clock)
    return engine_of_parts(
        runner,
        scheduler,
        speculator,
        validator,
        tokenizer=target.tokenizer,
        clock=clock,
        graph=graph,
        hooks=hooks,
        audit_fraction=config.audit_fraction,
        counted_bytes=sizing.memory.budget_bytes - sizing.memory.free_bytes,
        default_methods=default_methods(config.speculation, proposers),
        fingerprint=system_fingerprint,
        objectives=Objectives(config.ttft_objective, config.tpot_objective),
    )


def fingerprint_of(config: EngineConfig, target: LoadedModel) -> SystemFingerprint:
    """What the texts of `target` depend on, under this configuration."""
    model = target.model
    tokenizer = hashlib.sha256(repr(astuple(fingerprint(target.tokenizer))).encode()).hexdigest()
    if model.device.type == "cuda":
        kind = torch.cuda.get_device_name(model.device)
    elif model.dtype is torch.float32 and native.available():
        kind = model.device.type
    else:  # its sums are those of torch, which depend on its version and on the instruction set
        kind = f"{model.device.type}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return SystemFingerprint(
        weights=target.checksum[:CHECKSUM_DIGITS],
        tokenizer=tokenizer[:CHECKSUM_DIGITS],
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=config.quantization,
        activations=config.activations,
        kv_dtype=config.kv_dtype,
        device=kind,
        ranks=config.tensor_parallel_size,
    )


def engine_of_parts(
    runner: ModelRunner,
    scheduler: Scheduler,
    speculator: Speculator,
    validator: RequestValidator,
    *,
    tokenizer: Tokenizer | None = None,
    clock: Clock | None = None,
    graph: "GraphExecutor | None" = None,
    hooks: Sequence[StepHook] = (),
    audit_fraction: float = 0.0,
    counted_bytes: int = 0,
    default_methods: Sequence[str] = (),
    fingerprint: SystemFingerprint | None = None,
    objectives: Objectives = DEFAULT_OBJECTIVES,
) -> Engine:
    """An engine with the hooks that every engine has, followed by `hooks`. If `default_methods` names two methods, a request
    that names none gets the faster one; if it is empty, such a request gets the validator's default."""
    clock = clock or WallClock()
    assignment = (
        DefaultMethodTrial(default_methods, speculator.proposers, scheduler, validator, clock)
        if default_methods
        else None
    )
    audit = SelfAudit(runner, scheduler, audit_fraction, clock.now)
    built_in: list[StepHook | None] = [
        assignment,
        audit,
        KvImports(runner, scheduler, speculator, validator.limits.max_model_len),
        KvExports(runner, scheduler.tables),
        scheduler.tiers,
    ]
    return Engine(
        runner,
        scheduler,
        speculator,
        validator,
        tokenizer=tokenizer,
        clock=clock,
        graph=graph,
        hooks=(*(hook for hook in built_in if hook is not None), *hooks),
        assignment=assignment,
        audit=audit,
        counted_bytes=counted_bytes,
        fingerprint=fingerprint,
        objectives=objectives,
    )


def _log_sizes(config: EngineConfig, sizing: Sizing) -> None:
    asked, window = config.max_model_len, sizing.window
    if asked is not None and window < asked:
        logger.warning("max_model_len is %d, but the model supports %d: using that", asked, window)
    logger.info("%s, sequences of up to %d", sizing.description, window)


def _make_validator(
    config: EngineConfig, target: LoadedModel, sizing: Sizing, proposers: dict[str, Proposer]
) -> RequestValidator:
    return RequestValidator(
        Limits(target.config.vocab_size, sizing.window, sizing.limits.max_depth),
        config.speculation.verification,
        pick_method(config.speculation, proposers),
        proposers,
        target.tokenizer,
    )


def _graph_drafting(proposers: Mapping[str, Proposer], max_draft_tokens: int) -> GraphDrafting:
    """The first proposer that can run inside a graph drafts there."""
    proposer = next((candidate for candidate in proposers.values() if candidate.traits.can_run_in_graph), None)
    methods = frozenset(name for name, candidate in proposers.items() if candidate is proposer)
    in_graph = cast("GraphProposer | None", proposer)
    padded = _padded_batches(in_graph, methods, frozenset(proposers), max_draft_tokens)
    return GraphDrafting(in_graph, methods, padded)


def _padded_batches(
    proposer: "GraphProposer | None", in_graph: frozenset[str], methods: frozenset[str], max_draft_tokens: int
) -> tuple[PaddedBatch, PaddedBatch]:
    """How many rows a graph step has, and how many a pass with drafts that are made on the host."""
    from paceline.engine.graph import draft_shape
    from paceline.models.device import MAX_GRAPH_ROWS

    return (
        PaddedBatch(in_graph, padded_size, lambda depth: draft_shape(proposer, depth).nodes, max_draft_tokens),
        PaddedBatch(methods - in_graph, padded_size, lambda depth: padded_size(1 + depth) - 1, MAX_GRAPH_ROWS // 2),
    )


def _make_speculator(
    config: EngineConfig,
    target: LoadedModel,
    limits: ResolvedLimits,
    proposers: Mapping[str, Proposer],
    drafting: GraphDrafting,
    validator: RequestValidator,
    clock: Clock,
) -> Speculator:
    return Speculator(
        proposers,
        make_depth(config.speculation, limits.max_depth, drafting.padded),
        make_breaker(config.speculation),
        validator,
        clock,
        target.config.vocab_size,
        config.speculation.enabled,
        drafting.methods,
    )


def _make_graph_executor(
    runner: ModelRunner,
    drafting: GraphDrafting,
    scheduler: Scheduler,
    speculator: Speculator,
    validator: RequestValidator,
    limits: ResolvedLimits,
    clock: Clock,
) -> "GraphExecutor":
    from paceline.engine.graph import GraphExecutor
    from paceline.models.runner.gpu import GpuRunner

    assert isinstance(runner, GpuRunner)
    return GraphExecutor(runner, drafting.proposer, scheduler, speculator, validator, limits.max_depth, clock)


Load = Callable[[str, torch.device, torch.dtype, Quantization | None, Activations], LoadedModel]
LoadRanks = Callable[[RankSpec], tuple[LoadedModel, Ranks]]


def build_engine(
    config: EngineConfig,
    pool: Callable[[LoadedModel], Proposer] | None = None,
    load: Load = load_model,
    hooks: Sequence[StepHook] = (),
    extra_proposers: Mapping[str, Proposer] | None = None,
    load_ranks: LoadRanks = load_parallel,
) -> Engine:
    """`pool` makes the proposer `pool` for the loaded target: drafts from draft workers. `load` loads a target for one device;
    it may return before all weights have arrived. `hooks` listen to every step. `extra_proposers` join the built-in
    ones under their names. `load_ranks` loads a target for several ranks."""
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
            engine = assemble(config, target, draft, ranks, pool, hooks, extra_proposers)
            calibrate(engine, config)
            return engine
        except BaseException:
            ranks.close()
            raise
    if device.type == "cpu":
        native.available()  # compiles the kernels once, in a phase of its own
    with KernelCompilation.start(config, device) as compilation:
        with phase("read weights") as reading:
            target = load(config.model, device, dtype, quantization, config.activations)
            reading.note = f"{target.model.weight_bytes / 1e9:.1f} GB"
        draft = _load_draft(config, target)
        engine = assemble(config, target, draft, None, pool, hooks, extra_proposers)
        with phase("wait for kernels") if compilation.is_running else nullcontext():
            compilation.wait()
    if target.model.is_complete and device.type != "meta":
        with phase("calibrate"):
            calibrate(engine, config)
    return engine


def load_weights(config: EngineConfig, engine: Engine, name: str, load: Load = load_model) -> LoadedModel:
    """The model `name` in the formats of a running engine, in addition to its target: weights for `Engine.use_weights`. Raises
    `PacelineError` if the engine cannot use them."""
    model = engine.runner.model
    if config.tensor_parallel_size > 1:
        raise InvalidConfig(
            "weights of a tensor-parallel target are not replaced while it runs: restart the server with the new model"
        )
    loaded = load(name, model.device, model.dtype, pick_quantization(config.quantization), config.activations)
    check_replaceable(model, loaded.model)
    assert engine.tokenizer is not None
    mine, its = fingerprint(engine.tokenizer), fingerprint(loaded.tokenizer)
    if (mine.vocabulary, mine.stop_tokens) != (its.vocabulary, its.stop_tokens):
        part = "vocabulary" if mine.vocabulary != its.vocabulary else "stop tokens"
        raise UnsupportedModel(
            f"{name} has another {part} than the model in use: restart the server with the new model"
        )
    return loaded


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
    """The draft exists and has the target's tokens. Checked before weights are read, which can take minutes."""
    name = draft_of(config)
    if name is None:
        return
    try:
        if find_draft(name) is None:
            check_pair(config.model, name)
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
    warning = check_compatible(target.tokenizer, draft.tokenizer)
    if warning is not None:
        logger.warning("the draft %s: %s", name, warning)
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
