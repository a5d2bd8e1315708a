"""Estimates for a target and its drafts: speed, memory and dollars from measured times.

The last functions compute what the workers of a running cluster cost. Units are seconds, bytes and dollars.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import InvalidRequest
from paceline.core.status import WorkerStatus
from paceline.policy.cost.speculation import GivenCosts, expected_tokens, mean_alpha

PLAIN = "plain"


def dollars_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    return price_per_hour / (3600.0 * tokens_per_second) * 1e6


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, width: int) -> int:
    """Bytes of the keys and values of `tokens` tokens, at `width` bytes per value."""
    return 2 * layers * kv_heads * head_dim * tokens * width


def speculative_slots(depth: int, sequences: int) -> int:
    """Cache slots that the drafts of the batch hold until verification."""
    return depth * sequences


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one model on its device."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes: int = 0

    def bytes(self, kv_tokens: int) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes_per_token * kv_tokens


@dataclass(frozen=True, slots=True)
class TargetCosts:
    """The target model and its load."""

    pass_seconds: Mapping[int, float]
    """Seconds of one pass with sampling, by rows. A plain step has `batch` rows, a round at depth K has batch * (K + 1)."""
    batch: int = 1
    footprint: Footprint = field(default_factory=Footprint)
    kv_tokens: int = 0
    """Committed tokens in the cache."""
    memory_bytes: int | None = None
    """Memory of the device. If None, it is not checked."""
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidRequest(f"batch must be at least 1, got {self.batch}", field="batch")
        if not self.pass_seconds or min(self.pass_seconds.values()) <= 0.0:
            raise InvalidRequest("the time of a target pass is required and must be above 0", field="pass_seconds")

    @property
    def plain_seconds(self) -> float:
        return GivenCosts(self.pass_seconds, {}).verify(self.batch)


@dataclass(frozen=True, slots=True)
class MethodCosts:
    """A method of drafting, with measured or given figures."""

    name: str
    alphas: tuple[float, ...]
    draft_seconds: Mapping[int, float]
    """Seconds that a round waits for its drafts, by depth."""
    network_seconds: float = 0.0
    delivery: float = 1.0
    """Share of rounds with a draft. The remaining rounds are plain steps."""
    tokens: Mapping[int, float] = field(default_factory=dict)
    """Measured tokens per round by depth, for trees and drafts that stop early; alphas describe chains only."""
    nodes: Mapping[int, float] = field(default_factory=dict)
    """Tokens of such a draft by depth. If it is empty, a draft has as many tokens as its depth."""
    footprint: Footprint = field(default_factory=Footprint)
    price_per_hour: float = 0.0
    """Price of its own device. 0 if it shares the target's device and memory."""

    def __post_init__(self) -> None:
        if not self.alphas or not all(0.0 <= alpha <= 1.0 for alpha in self.alphas):
            raise InvalidRequest(
                f"{self.name}: alpha must be in [0, 1], got {', '.join(f'{alpha:g}' for alpha in self.alphas)}",
                field="alpha",
            )
        if not self.draft_seconds or min(*self.draft_seconds.values(), self.network_seconds) < 0.0:
            raise InvalidRequest(f"{self.name}: times are required and must not be negative", field="draft_seconds")
        if not 0.0 < self.delivery <= 1.0:
            raise InvalidRequest(f"{self.name}: delivery must be in (0, 1], got {self.delivery}", field="delivery")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected result of one method at one depth; depth 0 is plain decoding."""

    method: str
    depth: int
    alpha: float
    tokens: float
    """Tokens per round and sequence."""
    draft_seconds: float
    verify_seconds: float
    network_seconds: float
    speedup: float
    tokens_per_second: float
    """Tokens per second of the batch."""
    memory_bytes: int
    fits: bool
    dollars_per_million: float | None

    @property
    def accepted(self) -> float:
        """Accepted drafts per round."""
        return self.tokens - 1.0

    @property
    def round_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.network_seconds


def plain(target: TargetCosts) -> Estimate:
    return _estimate(target, PLAIN, 0, 0.0, 1.0, (0.0, target.plain_seconds, 0.0), None)


def estimate(target: TargetCosts, method: MethodCosts, depth: int) -> Estimate:
    """speedup = E * t_plain / (t_draft(K) + t_verify(B (K + 1)) + t_network).

    A round without a draft (1 - delivery of them) yields one token and costs a plain step.
    """
    full = method.tokens.get(depth) if method.tokens else None
    tokens = 1.0 + method.delivery * (expected_tokens(method.alphas, depth) - 1.0) if full is None else full
    costs = GivenCosts(target.pass_seconds, method.draft_seconds)
    verify = costs.verify(target.batch * (1 + method.nodes.get(depth, depth)))
    times = (
        costs.draft(target.batch, depth),
        method.delivery * verify + (1.0 - method.delivery) * target.plain_seconds,
        method.network_seconds,
    )
    return _estimate(target, method.name, depth, mean_alpha(method.alphas, depth), tokens, times, method)


def estimates_by_depth(target: TargetCosts, method: MethodCosts, max_depth: int) -> list[Estimate]:
    """Estimates up to `max_depth`, of every depth for chains and of the measured depths for other methods."""
    depths = sorted(method.tokens) or range(1, max_depth + 1)
    return [estimate(target, method, depth) for depth in depths if depth <= max_depth]


def _estimate(
    target: TargetCosts,
    name: str,
    depth: int,
    alpha: float,
    tokens: float,
    times: tuple[float, float, float],
    method: MethodCosts | None,
) -> Estimate:
    draft, verify, network = times
    rate = tokens / (draft + verify + network)
    per_second = target.batch * rate
    # Drafts hold slots in the target's cache, and in the draft's own where it has one.
    kv_tokens = target.kv_tokens + speculative_slots(depth, target.batch)
    shares_device = method is not None and not method.price_per_hour
    memory = target.footprint.bytes(kv_tokens) + (method.footprint.bytes(kv_tokens) if method and shares_device else 0)
    price = target.price_per_hour
    return Estimate(
        method=name,
        depth=depth,
        alpha=alpha,
        tokens=tokens,
        draft_seconds=draft,
        verify_seconds=verify,
        network_seconds=network,
        speedup=rate * target.plain_seconds,
        tokens_per_second=per_second,
        memory_bytes=memory,
        fits=target.memory_bytes is None or memory <= target.memory_bytes,
        dollars_per_million=None
        if price is None
        else dollars_per_million(price + (method.price_per_hour if method else 0.0), per_second),
    )


GONE = "gone"


def dollars_per_hour(workers: Sequence[WorkerStatus]) -> float | None:
    """Price of all workers that exist, also of those that start or drain; None if no pool has a price."""
    prices = [worker.price for worker in workers if worker.price is not None and worker.state != GONE]
    return sum(prices) if prices else None


def recent_cost(workers: Sequence[WorkerStatus], tokens_per_second: float) -> float | None:
    """Dollars per million tokens at this rate; None without prices or tokens."""
    price = dollars_per_hour(workers)
    return None if price is None or tokens_per_second <= 0.0 else dollars_per_million(price, tokens_per_second)


def cost_since_start(workers: Sequence[WorkerStatus], now: float) -> float | None:
    """Dollars per million tokens since the present processes started. None without prices or tokens.

    `now` is the time in seconds since 1970."""
    present = [worker for worker in workers if worker.state != GONE]
    dollars = sum(
        worker.price * max(0.0, now - worker.life.started) / 3600.0
        for worker in present
        if worker.price is not None and worker.life.started is not None
    )
    tokens = sum(worker.generated for worker in present if worker.role == "target")
    return dollars / tokens * 1e6 if dollars > 0.0 and tokens else None
