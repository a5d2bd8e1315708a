"""The result of a simulation, the report made from it, and the objectives of a service.

An `Objective` holds the latencies that a request must meet.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidRequest
from paceline.core.pool_config import Role
from paceline.planning import ROLES
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.settings import SimulationConfig


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits in seconds. An infinite value is no limit. A request meets the objective if it meets `ttft` and `tpot`."""

    ttft: float = math.inf
    """Time to first token."""
    tpot: float = math.inf
    """Mean time per token after the first."""
    share: float = 0.99
    """Share of the requests that must meet them."""

    def __post_init__(self) -> None:
        if not (self.ttft > 0.0 and self.tpot > 0.0 and 0.0 < self.share <= 1.0):
            raise InvalidRequest(
                f"an objective needs times above 0 and a share in (0, 1], got {self}", field="objective"
            )

    def is_met(self, ttft: float, tpot: float) -> bool:
        return ttft <= self.ttft and tpot <= self.tpot


@dataclass(frozen=True, slots=True)
class WorkerUse:
    name: str
    role: Role
    seconds: float
    """Time that it was paid for."""
    busy_seconds: float
    """Time of its steps."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Workers that serve or start from `time` on."""

    time: float
    workers: Mapping[Role, int]
    ready_targets: int


@dataclass(frozen=True, slots=True)
class SimulationResult:
    config: SimulationConfig
    trace: str
    jobs: tuple[SimulatedRequest, ...]
    """All requests, finished."""
    rejected: int
    """Requests that no worker can hold."""
    seconds: float
    """Time of the last end."""
    workers: tuple[WorkerUse, ...]
    busy_seconds: Mapping[Role, float]
    """Time of the steps of all workers of a role."""
    paid_seconds: Mapping[Role, float]
    steps: int
    """Steps of the target workers."""
    handoffs: int = 0
    failed_handoffs: int = 0
    sizes: tuple[PoolSize, ...] = ()
    """Sizes of the pools over time; one entry without a controller."""

    @property
    def dollars(self) -> float:
        """Cost of all workers from their start to their end."""
        return sum(self.paid_seconds[role] * self.config.price(role) for role in ROLES) / 3600.0

    def utilisation(self, role: Role) -> float:
        """Share of the paid time in which workers of the role run steps."""
        return self.busy_seconds[role] / self.paid_seconds[role] if self.paid_seconds[role] else 0.0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        p50, p90, p99 = (quantile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the nearest of the sorted values."""
    rank = (len(ordered) - 1) * share
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class SimulationReport:
    trace: str
    requests: int
    rejected: int
    seconds: float
    ttft: Quantiles
    tpot: Quantiles
    """Time per token after the first, of answers with at least two."""
    output_tokens: int
    tokens_per_second: float
    """Output tokens of all workers."""
    hit_rate: float
    """Share of prompt tokens found in a prefix cache."""
    utilisation: float
    """Share of the time in which a target worker runs a step, mean over workers."""
    prefill_utilisation: float
    draft_utilisation: float
    attainment: float
    """Share of all requests that met the objective; a rejected request does not."""
    dollars: float
    """Cost of all workers from the first arrival to the last end."""
    dollars_per_million: float
    """Dollars per million output tokens."""
    steps: int
    handoffs: int
    """Prompts that prefill workers computed."""
    failed_handoffs: int
    moved: int
    """Requests that continued on another worker after a loss."""


def summarize(result: SimulationResult, objective: Objective) -> SimulationReport:
    jobs = result.jobs
    output = sum(job.output_tokens for job in jobs)
    prompts = sum(job.prompt_tokens for job in jobs)
    seconds = result.seconds
    met = sum(objective.is_met(job.ttft, job.tpot) for job in jobs)
    rate, dollars = output / seconds if seconds else 0.0, result.dollars
    return SimulationReport(
        trace=result.trace,
        requests=len(jobs) + result.rejected,
        rejected=result.rejected,
        seconds=seconds,
        ttft=Quantiles.of([job.ttft for job in jobs]),
        tpot=Quantiles.of([job.tpot for job in jobs if job.output_tokens > 1]),
        output_tokens=output,
        tokens_per_second=rate,
        hit_rate=sum(job.cached for job in jobs) / prompts if prompts else 0.0,
        utilisation=result.utilisation("target"),
        prefill_utilisation=result.utilisation("prefill"),
        draft_utilisation=result.utilisation("draft"),
        attainment=met / (len(jobs) + result.rejected),
        dollars=dollars,
        dollars_per_million=dollars / output * 1e6 if output else 0.0,
        steps=result.steps,
        handoffs=result.handoffs,
        failed_handoffs=result.failed_handoffs,
        moved=sum(job.moves > 0 for job in jobs),
    )
