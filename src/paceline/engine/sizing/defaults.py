"""Default limits of an engine, chosen from its device and its models.

| limit | GPU | CPU |
|---|---|---|
| sequences | 256, fewer if their logits and a minimal cache do not fit | 64 |
| tokens of a step | 8,192, fewer if the pass would take too long or too much memory | 256 |
| draft tokens of a step | 512 with the rule `goodput` | no limit of its own |
| depth | 8; 31 for trees that a graph step drafts | 8 |
"""

from dataclasses import dataclass
from typing import Literal

from paceline.core.config import DEFAULT_DEPTH, PUBLISHED_DEPTHS, DepthRule
from paceline.core.errors import InvalidConfig

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
