"""Sizes of an engine: its default limits, and the share of memory of each part.

`resolve_limits` chooses the limits that a configuration leaves open, from the device and the models:

| limit | GPU | CPU |
|---|---|---|
| sequences | 256, fewer if their logits and a minimal cache do not fit | 64 |
| tokens of a step | 8,192, fewer if the pass would take too long or too much memory | 256 |
| draft tokens of a step | 512 with the rule `goodput` | no limit of its own |
| depth | 8; 31 for trees that a graph step drafts | 8 |

`memory_fit` computes whether the target and the draft fit the device, and how many tokens of KV cache remain. `size_engine`
applies both to the models of an engine.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import torch

from paceline.core.config import DEFAULT_DEPTH, PUBLISHED_DEPTHS, DepthRule, EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.machine import GIB, total_memory, usable_cores
from paceline.core.sequence import BLOCK_SIZE
from paceline.engine.step.step import PICKING_BYTES
from paceline.kernels.formats.layout import gpu_model
from paceline.kv import blocks_for
from paceline.models.device import MAX_GRAPH_ROWS
from paceline.models.drafts import LoadedHead
from paceline.models.families.spec import DecoderSpec
from paceline.models.heads.block import BlockModel
from paceline.models.heads.eagle import LANE_BLOCKS, EagleModel
from paceline.models.loading import LoadedModel
from paceline.policy.step import padded_size
from paceline.speculation.proposers.eagle import PENDING_ROWS, WIDTH

SEQUENCES = (256, 128, 64, 32, 16, 8)
TOKENS = (8192, 4096, 2048, 1024, 512)
"""Candidates on a GPU, the best first."""
CPU_SEQUENCES, CPU_TOKENS = 64, 256
PASS_WORK = 2048 * 71_000_000_000 // 132
"""Rows times weights of the longest pass, for each multiprocessor: 2,048 rows of a 70B model on an H200, half a second."""
ACTIVATION_SHARE = 0.1
"""Share of the memory left by the weights that the logits of a pass may take, and that its hidden states may take."""
CACHE_PER_SEQUENCE = 512
"""Tokens of cache that every sequence must find, or its window if that is shorter."""
TREE_DEPTH = 31
"""Nodes of the largest tree that a graph step drafts."""
DRAFT_TOKENS = 512
"""Draft tokens of one step that `goodput` may use on a GPU. A pass is compute-bound from about 200 rows, so more never pay, and
every shape of a step needs its own graphs."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int
    processors: int
    """Multiprocessors of a GPU, cores of a CPU."""

    def __str__(self) -> str:
        unit = f"{self.processors} cores, " if self.kind == "cpu" else ""
        return f"{self.kind} ({self.name + ', ' if self.name else ''}{unit}{self.memory_bytes / 1e9:.0f} GB)"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Target and draft together."""

    num_weights: int
    """Weights of the target on one device."""
    weight_bytes: int
    kv_bytes_per_token: int
    row_bytes: int
    """Activations of one scheduled token."""
    logit_bytes: int
    """Activations of one row of logits."""
    window: int
    drafts_trees_in_graphs: bool = False


@dataclass(frozen=True, slots=True)
class GivenLimits:
    """Configured limits. The device decides each limit that is None."""

    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_depth: int | None = None
    rule: DepthRule = "goodput"


@dataclass(frozen=True, slots=True)
class Limit:
    value: int
    reason: str


@dataclass(frozen=True, slots=True)
class ResolvedLimits:
    sequences: Limit
    tokens: Limit
    drafts: Limit
    depth: Limit

    @property
    def max_num_seqs(self) -> int:
        return self.sequences.value

    @property
    def max_batched_tokens(self) -> int:
        return self.tokens.value

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens of one step, over all sequences."""
        return self.drafts.value

    @property
    def max_depth(self) -> int:
        return self.depth.value

    @property
    def max_logit_rows(self) -> int:
        """Most rows of one step whose logits are computed."""
        drafts = min(self.max_num_seqs * self.max_depth, self.max_draft_tokens)
        return min(self.max_num_seqs + drafts, self.max_batched_tokens)

    def __str__(self) -> str:
        return (
            f"{self.sequences.value} sequences ({self.sequences.reason}), "
            f"{self.tokens.value} tokens a step ({self.tokens.reason}), "
            f"depth up to {self.depth.value} ({self.depth.reason})"
        )


def resolve_limits(device: DeviceFacts, models: ModelFacts, given: GivenLimits, budget_bytes: int) -> ResolvedLimits:
    """The limits of an engine that may use `budget_bytes` of the device. Raises `InvalidConfig` if the configured limits
    exclude each other."""
    depth = _depth(device, models, given)
    sequences = _sequences(device, models, given, budget_bytes, depth.value)
    tokens = _tokens(device, models, given, budget_bytes, sequences.value)
    if tokens.value < sequences.value:
        raise InvalidConfig(
            f"max_batched_tokens ({tokens.value}) must be at least max_num_seqs ({sequences.value}): every running "
            "sequence is scheduled at least one token"
        )
    drafts = Limit(tokens.value, "as many as tokens")
    if device.kind == "cuda" and given.rule == "goodput":
        drafts = Limit(min(DRAFT_TOKENS, tokens.value), "more never pay")
    return ResolvedLimits(sequences, tokens, drafts, depth)


def _depth(device: DeviceFacts, models: ModelFacts, given: GivenLimits) -> Limit:
    if given.max_depth is not None:
        return Limit(given.max_depth, "configured")
    if device.kind == "cuda" and models.drafts_trees_in_graphs and given.rule == "goodput":
        return Limit(TREE_DEPTH, "nodes of a tree")
    if given.rule in PUBLISHED_DEPTHS:
        return Limit(PUBLISHED_DEPTHS[given.rule], f"as published for {given.rule}")
    return Limit(DEFAULT_DEPTH, "default")


def _sequences(device: DeviceFacts, models: ModelFacts, given: GivenLimits, budget: int, depth: int) -> Limit:
    if given.max_num_seqs is not None:
        return Limit(given.max_num_seqs, "configured")
    most = given.max_batched_tokens or TOKENS[0]
    if device.kind == "cpu":
        return Limit(min(CPU_SEQUENCES, most), "shortest wait on CPUs")
    available = budget - models.weight_bytes
    cache_each = min(models.window, CACHE_PER_SEQUENCE) * models.kv_bytes_per_token

    def fits(count: int) -> bool:
        drafts = min(count * depth, DRAFT_TOKENS) if given.rule == "goodput" else count * depth
        logits = (count + drafts) * models.logit_bytes
        return logits <= ACTIVATION_SHARE * available and logits + count * cache_each <= available

    count = next((count for count in SEQUENCES if fits(count)), SEQUENCES[-1])
    return Limit(min(count, most), "best measured on GPUs" if count == SEQUENCES[0] else "as many as memory holds")


def _tokens(device: DeviceFacts, models: ModelFacts, given: GivenLimits, budget: int, sequences: int) -> Limit:
    if given.max_batched_tokens is not None:
        return Limit(given.max_batched_tokens, "configured")
    if device.kind == "cpu":
        return Limit(max(CPU_TOKENS, sequences), "shortest wait on CPUs")
    available = budget - models.weight_bytes
    all_prompts = next((count for count in reversed(TOKENS) if count >= sequences * models.window), TOKENS[0])
    bounds = {
        "best measured on GPUs": TOKENS[0],
        "all prompts at once": all_prompts,
        "a longer pass would delay decoding": PASS_WORK * device.processors // models.num_weights,
        "more take too much memory": int(ACTIVATION_SHARE * available) // models.row_bytes,
    }
    reason = min(bounds, key=lambda name: bounds[name])
    count = next((count for count in TOKENS if count <= bounds[reason]), TOKENS[-1])
    return Limit(max(count, sequences), reason)


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """Memory of one model."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    activation_bytes: int
    """The largest pass: its hidden states and its logits."""


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """The target's and the draft's cache hold `kv_tokens` each: a sequence that fits the target's cache fits the draft's."""

    budget_bytes: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE

    @property
    def kv_bytes(self) -> int:
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.weight_bytes - self.activation_bytes - self.kv_bytes


def memory_fit(
    target: ModelFootprint,
    draft: ModelFootprint | None,
    budget_bytes: int,
    wanted_tokens: int,
    required_tokens: int,
) -> MemoryFit:
    """Divide `budget_bytes`. Weights and activations come first, and the caches of target and draft get the rest, up to
    `wanted_tokens`.

    `required_tokens` is the size of one sequence of full length with its drafts. With less, no request could run.
    """
    models = [target] if draft is None else [target, draft]
    weights = sum(model.weight_bytes for model in models)
    activations = sum(model.activation_bytes for model in models)
    per_token = sum(model.kv_bytes_per_token for model in models)
    available = (budget_bytes - weights - activations) // per_token
    tokens = min(wanted_tokens, available) // BLOCK_SIZE * BLOCK_SIZE
    if tokens < required_tokens:
        raise OutOfMemory(
            _advice(models, budget_bytes, weights, activations, per_token, max(tokens, 0), required_tokens)
        )
    return MemoryFit(budget_bytes, weights, activations, per_token, tokens)


def _advice(
    models: list[ModelFootprint],
    budget: int,
    weights: int,
    activations: int,
    per_token: int,
    available: int,
    required: int,
) -> str:
    names = " and ".join(model.name for model in models)
    parts = [
        f"{names} do not fit: weights {weights / GIB:.2f} GiB + activations {activations / GIB:.2f} GiB leave room for "
        f"{available} tokens of cache out of {budget / GIB:.2f} GiB, and one full sequence needs {required} "
        f"({required * per_token / GIB:.2f} GiB)."
    ]
    if available >= 4 * BLOCK_SIZE:
        parts.append(f"Set max_model_len to {available - BLOCK_SIZE} or less,")
    else:
        parts.append("Use a smaller or more strongly quantised model,")
    parts.append(
        "raise memory_fraction or kv_tokens," if len(models) == 1 else "leave out the draft or take a smaller one,"
    )
    parts.append("or take a device with more memory.")
    return " ".join(parts)


SMALL_WINDOW = 8192
"""Tokens of a sequence down to which a longer window is halved if its cache does not fit."""
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
    facts = device_facts(device)
    budget = int(facts.memory_bytes * config.memory_fraction)
    if facts.kind == "cpu":  # ranks share it
        budget //= config.tensor_parallel_size
    longest = target.config.max_position
    if config.max_model_len is not None:
        return _size(config, target, draft, device, facts, budget, min(config.max_model_len, longest))
    window = longest
    while window > SMALL_WINDOW:
        with suppress(OutOfMemory, InvalidConfig):
            sizing = _size(config, target, draft, device, facts, budget, window)
            if facts.kind != "cpu" or config.kv_tokens or sizing.memory.kv_bytes <= _cpu_cache_bytes(budget):
                return sizing
        window //= 2
    return _size(config, target, draft, device, facts, budget, min(longest, SMALL_WINDOW))


def _size(
    config: EngineConfig,
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    device: torch.device,
    facts: DeviceFacts,
    budget: int,
    window: int,
) -> Sizing:
    """The sizes for sequences of up to `window` tokens."""
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
    """Hidden states of one scheduled token. The tables of a distilled draft have no layers."""
    if isinstance(model, LoadedHead):
        if not isinstance(model.model, EagleModel | BlockModel):
            return 0
        shape = model.model.config.decoder
        return (6 * shape.hidden_size + 3 * shape.ffn_size) * model.model.dtype.itemsize
    if not model.config.layers:
        return 0
    hidden, inner, experts = model.config.hidden_size, 3 * model.config.ffn_size, model.config.experts
    fed = inner if experts is None else experts.per_token * (2 * hidden + inner)
    return (4 * hidden + fed) * model.model.dtype.itemsize


def _logit_bytes(shape: DecoderSpec) -> int:
    """One row of float32 logits."""
    return shape.vocab_size * 4


def _slot_bytes(limits: ResolvedLimits, shape: DecoderSpec) -> int:
    """The tokens that penalties count, an integer for each slot of a graph step and each token of the vocabulary."""
    return padded_size(limits.max_num_seqs) * shape.vocab_size * 4


def _head_bytes(head: LoadedHead, limits: ResolvedLimits) -> int:
    """Hidden states that a head has yet to compute, and the cache of its branches."""
    if not isinstance(head.model, EagleModel | BlockModel):
        return 0
    shape = head.model.config
    pending = PENDING_ROWS * len(shape.state_layers) * shape.state_size * head.model.dtype.itemsize
    if isinstance(head.model, BlockModel):
        return pending
    return pending + num_lanes(limits.max_num_seqs) * LANE_BLOCKS * BLOCK_SIZE * head.kv_bytes_per_token()


def _cpu_cache_bytes(budget: int) -> int:
    return max(CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * budget))


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
    if device.type != "cpu":
        slots = _slot_bytes(limits, target.config)
        footprints[0] = replace(footprints[0], activation_bytes=footprints[0].activation_bytes + slots)
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
        cache_bytes = _cpu_cache_bytes(budget)
        if cache_bytes // per_token < wanted:
            wanted, reason = max(cache_bytes // per_token, required), f"{cache_bytes / GIB:.1f} GiB"
    fit = memory_fit(footprints[0], footprints[1], budget, wanted, required)
    if fit.kv_tokens + BLOCK_SIZE <= wanted:
        reason = f"what memory_fraction {config.memory_fraction:g} leaves"
    return fit, reason
