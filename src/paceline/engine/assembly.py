"""Assembles an engine from loaded models: sizes, runner, proposers, validator, speculator, scheduler and graph executor."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from paceline.cluster.step import padded_size
from paceline.core.clock import Clock, WallClock
from paceline.core.config import EngineConfig
from paceline.engine.engine import Engine
from paceline.engine.hooks.exports import KvExports
from paceline.engine.hooks.hook import StepHook
from paceline.engine.hooks.imports import KvImports
from paceline.engine.hooks.method_assignment import DefaultMethodTrial
from paceline.engine.hooks.self_audit import SelfAudit
from paceline.engine.hooks.tier_build import make_tiers
from paceline.engine.proposers import default_methods, make_proposers, pick_method
from paceline.engine.scheduler import Scheduler
from paceline.engine.sizing.defaults import ResolvedLimits
from paceline.engine.sizing.sizing import Sizing, size_engine
from paceline.engine.speculator import Speculator
from paceline.engine.validator import Limits, RequestValidator
from paceline.kernels.gpu_model import uses_gpu_kernels
from paceline.kv.block_tables import BlockTables
from paceline.models.drafts.load import LoadedHead
from paceline.models.loading.load import LoadedModel
from paceline.models.parallel.ranks import Ranks
from paceline.models.runner import ModelRunner
from paceline.models.runners import make_runner
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.speculation.depth.padded_batch import PaddedBatch
from paceline.speculation.depth_rule import make_breaker, make_depth
from paceline.speculation.proposer import Proposer

if TYPE_CHECKING:
    from paceline.engine.executors.graph.drafters.drafter import GraphProposer
    from paceline.engine.executors.graph.executor import GraphExecutor

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
    weights_id: str = "",
) -> Engine:
    """An engine that is complete and not calibrated. `ranks` are the ranks of a target that is split. `build_engine` describes
    the remaining parameters. Raises `OutOfMemory` if the models do not fit."""
    sizing = size_engine(config, target, draft, target.model.device)
    _log_sizes(config, sizing)
    limits, num_blocks, clock = sizing.limits, sizing.memory.num_blocks, WallClock()
    kv_dtype = torch.float8_e4m3fn if config.kv_dtype == "fp8" else None
    runner = make_runner(target.model, num_blocks, kv_dtype, weights_id, ranks)
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
    scheduler = Scheduler(
        tables, limits.max_num_seqs, limits.max_batched_tokens, tiers, limits.max_draft_tokens, runner.prompt_piece
    )
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
) -> Engine:
    """An engine with the hooks that every engine has, followed by `hooks`. If `default_methods` names two methods, a request
    that names none gets the faster one; if it is empty, such a request gets the validator's default."""
    clock = clock or WallClock()
    assignment = (
        DefaultMethodTrial(default_methods, speculator.proposers, scheduler, validator, clock)
        if default_methods
        else None
    )
    audit = SelfAudit(runner, scheduler.tables, audit_fraction)
    built_in: list[StepHook | None] = [
        assignment,
        audit,
        KvImports(runner, scheduler, speculator, validator.limits.max_model_len),
        KvExports(runner, scheduler.tables),
        scheduler.tiers,
        None if graph is None else graph.captures,
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
    from paceline.engine.executors.graph.drafters.selection import draft_shape
    from paceline.models.cuda_graph import MAX_GRAPH_ROWS

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
    from paceline.engine.executors.graph.executor import GraphExecutor
    from paceline.models.gpu.runner import GpuRunner

    assert isinstance(runner, GpuRunner)
    return GraphExecutor(runner, drafting.proposer, scheduler, speculator, validator, limits.max_depth, clock)
