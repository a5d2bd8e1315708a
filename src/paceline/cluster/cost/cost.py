"""What speculation brings and what it costs: figures in, expected tokens, speed, memory and dollars out.

Seconds, bytes and dollars throughout. alpha is conditional by position: accepted there, given that all before were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.core.errors import InvalidRequest

PLAIN = "plain"


def survival(alphas: Sequence[float], depth: int) -> list[float]:
    """[depth] S_k = prod_{j<=k} alpha_j: the tokens that draft k adds. Beyond the last known position its alpha goes on."""
    chances, chance = [], 1.0
    for k in range(depth):
        chance *= alphas[min(k, len(alphas) - 1)]
        chances.append(chance)
    return chances


def expected_tokens(alphas: Sequence[float], depth: int) -> float:
    """E = 1 + sum_k S_k; for one alpha everywhere, (1 - a^(K+1)) / (1 - a)."""
    return 1.0 + sum(survival(alphas, depth))


def mean_alpha(alphas: Sequence[float], depth: int) -> float:
    """Accepted over tested drafts of a chain: sum_k S_k / sum_k S_{k-1}, S_0 = 1. One alpha everywhere is itself."""
    chances = survival(alphas, depth)
    return sum(chances) / (1.0 + sum(chances[:-1])) if depth else 0.0


def dollars_per_million(price_per_hour: float, tokens_per_second: float) -> float:
    return price_per_hour / (3600.0 * tokens_per_second) * 1e6


def kv_bytes(layers: int, kv_heads: int, head_dim: int, tokens: int, width: int) -> int:
    """Keys and values of `tokens` tokens at `width` bytes a value."""
    return 2 * layers * kv_heads * head_dim * tokens * width


def speculative_slots(depth: int, sequences: int) -> int:
    """Cache slots that drafts of the whole batch hold until they are verified."""
    return depth * sequences


def at(curve: Mapping[int, float], x: float) -> float:
    """Straight between the measured points, level outside them."""
    xs = sorted(curve)
    if x <= xs[0]:
        return curve[xs[0]]
    for low, high in pairwise(xs):
        if x <= high:
            return curve[low] + (curve[high] - curve[low]) * (x - low) / (high - low)
    return curve[xs[-1]]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one model on its device."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes: int = 0

    def bytes(self, kv_tokens: int) -> int:
        return self.weight_bytes + self.activation_bytes + self.kv_bytes_per_token * kv_tokens


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is served, and the load it is served at."""

    pass_seconds: Mapping[int, float]
    """Rows -> one pass with its sampling. A plain step has `batch` rows, a round at depth K has batch * (K + 1)."""
    batch: int = 1
    footprint: Footprint = field(default_factory=Footprint)
    kv_tokens: int = 0
    """Tokens that the caches hold for committed text."""
    memory_bytes: int | None = None
    """What the device has; None does not judge."""
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InvalidRequest(f"a batch holds at least one sequence, got {self.batch}", field="batch")
        if not self.pass_seconds or min(self.pass_seconds.values()) <= 0.0:
            raise InvalidRequest("the time of a target pass must be given, and be above 0", field="pass_seconds")

    @property
    def plain_seconds(self) -> float:
        return at(self.pass_seconds, self.batch)


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft, as measured or given."""

    name: str
    alphas: tuple[float, ...]
    draft_seconds: Mapping[int, float]
    """Depth -> what a round waits for its drafts."""
    network_seconds: float = 0.0
    delivery: float = 1.0
    """Share of rounds in which it has anything to offer; in the others a round is a plain step."""
    tokens: Mapping[int, float] = field(default_factory=dict)
    """Depth -> tokens a round as measured, for drafts that fork or stop early: alphas of a chain say nothing about those."""
    nodes: Mapping[int, float] = field(default_factory=dict)
    """Depth -> tokens of such a draft; none given: as many as asked for."""
    footprint: Footprint = field(default_factory=Footprint)
    price_per_hour: float = 0.0
    """Of a device of its own; 0: it shares the target's, memory included."""

    def __post_init__(self) -> None:
        if not self.alphas or not all(0.0 <= alpha <= 1.0 for alpha in self.alphas):
            raise InvalidRequest(
                f"{self.name}: alpha must be in [0, 1], got {', '.join(f'{alpha:g}' for alpha in self.alphas)}",
                field="alpha",
            )
        if not self.draft_seconds or min(*self.draft_seconds.values(), self.network_seconds) < 0.0:
            raise InvalidRequest(f"{self.name}: times must be given and not be negative", field="draft_seconds")
        if not 0.0 < self.delivery <= 1.0:
            raise InvalidRequest(f"{self.name}: delivery must be in (0, 1], got {self.delivery}", field="delivery")


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one method at one depth would do; depth 0 is plain decoding."""

    method: str
    depth: int
    alpha: float
    tokens: float
    """A round and sequence."""
    draft_seconds: float
    verify_seconds: float
    network_seconds: float
    speedup: float
    tokens_per_second: float
    """Of the whole batch."""
    memory_bytes: int
    fits: bool
    dollars_per_million: float | None

    @property
    def accepted(self) -> float:
        """Draft tokens kept in a round."""
        return self.tokens - 1.0

    @property
    def round_seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.network_seconds


def plain(target: Target) -> Prospect:
    return _prospect(target, PLAIN, 0, 0.0, 1.0, (0.0, target.plain_seconds, 0.0), None)


def prospect(target: Target, method: Method, depth: int) -> Prospect:
    """speedup = E * t_plain / (t_draft(K) + t_verify(B (K + 1)) + t_network).

    A round without a draft (1 - delivery of them) yields one token and costs a plain step.
    """
    full = method.tokens.get(depth) if method.tokens else None
    tokens = 1.0 + method.delivery * (expected_tokens(method.alphas, depth) - 1.0) if full is None else full
    verify = at(target.pass_seconds, target.batch * (1 + method.nodes.get(depth, depth)))
    times = (
        at(method.draft_seconds, depth),
        method.delivery * verify + (1.0 - method.delivery) * target.plain_seconds,
        method.network_seconds,
    )
    return _prospect(target, method.name, depth, mean_alpha(method.alphas, depth), tokens, times, method)


def prospects(target: Target, method: Method, max_depth: int) -> list[Prospect]:
    """Every depth there are figures for: up to `max_depth` for chains, the measured ones for others."""
    depths = sorted(method.tokens) or range(1, max_depth + 1)
    return [prospect(target, method, depth) for depth in depths if depth <= max_depth]


def best_depth(target: Target, method: Method, max_depth: int) -> Prospect:
    """The fastest; of equals, the shallowest."""
    return max(prospects(target, method, max_depth), key=lambda one: one.speedup)


def _prospect(
    target: Target,
    name: str,
    depth: int,
    alpha: float,
    tokens: float,
    times: tuple[float, float, float],
    method: Method | None,
) -> Prospect:
    draft, verify, network = times
    rate = tokens / (draft + verify + network)
    per_second = target.batch * rate
    # Drafts hold slots in the target's cache, and in the draft's own where it has one.
    kv_tokens = target.kv_tokens + speculative_slots(depth, target.batch)
    is_guest = method is not None and not method.price_per_hour
    memory = target.footprint.bytes(kv_tokens) + (method.footprint.bytes(kv_tokens) if method and is_guest else 0)
    price = target.price_per_hour
    return Prospect(
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
