"""Sizes of an engine: its limits and the share of memory of each part."""

from dataclasses import dataclass

import torch

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.core.machine import GIB, total_memory, usable_cores
from paceline.engine.executors.executor import PICKING_BYTES
from paceline.engine.sizing.defaults import DeviceFacts, GivenLimits, ModelFacts, ResolvedLimits, resolve_limits
from paceline.engine.sizing.memory_fit import MemoryFit, ModelFootprint, memory_fit
from paceline.kernels.gpu_model import gpu_model
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import blocks_for
from paceline.models.architectures.config import ModelConfig
from paceline.models.cuda_graph import MAX_GRAPH_ROWS
from paceline.models.drafts.eagle import LANE_BLOCKS, EagleModel
from paceline.models.drafts.load import LoadedHead
from paceline.models.loading.load import LoadedModel
from paceline.speculation.proposers.pending_states import PENDING_ROWS
from paceline.speculation.trees.eagle_trees import WIDTH

DEFAULT_WINDOW = 8192
CPU_CACHE_BYTES = GIB
"""Size of the caches on a CPU if `kv_tokens` is not set, or `CPU_CACHE_SHARE` of the memory if that is more."""
CPU_CACHE_SHARE = 1 / 8


@dataclass(frozen=True, slots=True)
class Sizing:
    window: int
    """Largest number of tokens of one sequence."""
    limits: ResolvedLimits
    memory: MemoryFit
    description: str
    """Device, limits and cache with their reasons, for the log."""


def size_engine(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | LoadedHead | None, device: torch.device
) -> Sizing:
    """The sizes of an engine with these models. Raises `OutOfMemory` if they do not fit."""
    window = min(config.max_model_len or DEFAULT_WINDOW, target.config.max_position)
    facts = device_facts(device)
    budget = int(facts.memory_bytes * config.memory_fraction)
    if facts.kind == "cpu":  # ranks share it
        budget //= config.tensor_parallel_size
    speculation = config.speculation
    given = GivenLimits(config.max_num_seqs, config.max_batched_tokens, speculation.max_depth, speculation.depth)
    limits = resolve_limits(facts, _model_facts(config, target, draft, window), given, budget)
    memory, reason = _fit(config, limits, target, draft, device, window, budget)
    described = f"limits for {facts}: {limits}, KV cache {memory.kv_tokens:,} tokens ({reason})"
    return Sizing(window, limits, memory, described)


def device_facts(device: torch.device) -> DeviceFacts:
    """The GPU, or the cores and the memory that this process may use."""
    if device.type == "cpu":
        return DeviceFacts("cpu", "", total_memory(), usable_cores())
    gpu = gpu_model(device)
    assert gpu is not None
    return DeviceFacts("cuda", gpu.name, gpu.memory_bytes, gpu.multiprocessors)


def footprint(
    model: LoadedModel | LoadedHead, config: EngineConfig, limits: ResolvedLimits, device: torch.device, window: int
) -> ModelFootprint:
    """Memory of one model within these limits, for sequences of up to `window` tokens."""
    activations = limits.max_batched_tokens * _row_bytes(model)
    if isinstance(model, LoadedHead):
        return ModelFootprint(
            model.name, model.model.weight_bytes, model.kv_bytes_per_token(), activations + _head_bytes(model, limits)
        )
    logits = limits.max_logit_rows * _logit_bytes(model.config)
    activations += 2 * logits + min(10 * logits, PICKING_BYTES)
    if device.type != "cpu":  # a captured pass computes the logits of all its rows
        rows = max(MAX_GRAPH_ROWS, limits.max_logit_rows)
        activations += (1 << (rows - 1).bit_length()) * _logit_bytes(model.config)
        # The keys and values of one layer are gathered for a long prompt, while no feed-forward is in memory
        gathered = window * _kv_bytes(model, config) // model.config.num_layers
        feed_forward = limits.max_batched_tokens * 3 * model.config.ffn_size * model.model.dtype.itemsize
        activations += max(0, gathered - feed_forward)
    return ModelFootprint(model.name, model.model.weight_bytes, _kv_bytes(model, config), activations)


def num_lanes(max_num_seqs: int) -> int:
    """Tree branches that an EAGLE head computes in one pass: at least one per sequence, and full trees of a few."""
    return max(max_num_seqs, 4 * WIDTH)


def _model_facts(
    config: EngineConfig, target: LoadedModel, draft: LoadedModel | LoadedHead | None, window: int
) -> ModelFacts:
    models = [target] if draft is None else [target, draft]
    return ModelFacts(
        num_weights=target.config.num_parameters // config.tensor_parallel_size,
        weight_bytes=sum(model.model.weight_bytes for model in models),
        kv_bytes_per_token=sum(_kv_bytes(model, config) for model in models),
        row_bytes=sum(_row_bytes(model) for model in models),
        logit_bytes=2 * sum(_logit_bytes(model.config) for model in models if not isinstance(model, LoadedHead)),
        window=window,
        drafts_trees_in_graphs=isinstance(draft, LoadedHead)
        and isinstance(draft.model, EagleModel)
        and config.tensor_parallel_size == 1,
    )


def _kv_bytes(model: LoadedModel | LoadedHead, config: EngineConfig) -> int:
    if isinstance(model, LoadedHead):
        return model.kv_bytes_per_token()
    return model.config.kv_bytes_per_token(1 if config.kv_dtype == "fp8" else model.model.dtype.itemsize)


def _row_bytes(model: LoadedModel | LoadedHead) -> int:
    """Hidden states of one scheduled token."""
    if isinstance(model, LoadedHead):
        if not isinstance(model.model, EagleModel):
            return 0
        shape = model.model.config
        return (6 * shape.hidden_size + 3 * shape.ffn_size) * model.model.dtype.itemsize
    hidden, inner, experts = model.config.hidden_size, 3 * model.config.ffn_size, model.config.experts_per_token
    return (4 * hidden + (experts * (2 * hidden + inner) if experts else inner)) * model.model.dtype.itemsize


def _logit_bytes(shape: ModelConfig) -> int:
    """One row of float32 logits."""
    return shape.vocab_size * 4


def _head_bytes(head: LoadedHead, limits: ResolvedLimits) -> int:
    """Hidden states that a head has yet to compute, and the cache of its branches."""
    if not isinstance(head.model, EagleModel):
        return 0
    shape = head.model.config
    pending = PENDING_ROWS * len(shape.state_layers) * shape.hidden_size * head.model.dtype.itemsize
    return pending + num_lanes(limits.max_num_seqs) * LANE_BLOCKS * BLOCK_SIZE * head.kv_bytes_per_token()


def _fit(
    config: EngineConfig,
    limits: ResolvedLimits,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    device: torch.device,
    window: int,
    budget: int,
) -> tuple[MemoryFit, str]:
    """The memory of the target, the draft and their caches, and the reason for the size of the caches."""
    footprints = [
        None if model is None else footprint(model, config, limits, device, window) for model in (target, draft)
    ]
    assert footprints[0] is not None
    required = blocks_for(window) * BLOCK_SIZE + BLOCK_SIZE
    if config.kv_tokens is not None and config.kv_tokens < required:
        raise InvalidConfig(
            f"kv_tokens ({config.kv_tokens}) must hold one full sequence and a block for its drafts: raise it to "
            f"{required} or more, or set max_model_len (now {window}) lower"
        )
    wanted = config.kv_tokens or max(limits.max_num_seqs * window, required)
    reason = "configured" if config.kv_tokens else f"{limits.max_num_seqs} sequences of {window}"
    if device.type == "cpu" and config.kv_tokens is None:
        per_token = sum(f.kv_bytes_per_token for f in footprints if f is not None)
        cache_bytes = max(CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * budget))
        if cache_bytes // per_token < wanted:
            wanted, reason = max(cache_bytes // per_token, required), f"{cache_bytes / GIB:.1f} GiB"
    fit = memory_fit(footprints[0], footprints[1], budget, wanted, required)
    if fit.kv_tokens + BLOCK_SIZE <= wanted:
        reason = f"what memory_fraction {config.memory_fraction:g} leaves"
    return fit, reason
