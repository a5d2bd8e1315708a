"""The result of a simulation, and the report made from it."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.cost.cost import dollars_per_million
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.job import Job
from paceline.planning.simulation.objective import Objective


@dataclass(frozen=True, slots=True)
class SimulationResult:
    config: SimulationConfig
    trace: str
    jobs: tuple[Job, ...]
    """All requests, finished."""
    rejected: int
    """Requests that no worker can hold."""
    seconds: float
    """Time of the last end."""
    busy_seconds: tuple[float, ...]
    """Time of the steps of each worker."""
    steps: int


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
    attainment: float
    """Share of all requests that met the objective; a rejected request does not."""
    dollars: float
    """Cost of all workers from the first arrival to the last end."""
    dollars_per_million: float
    """Dollars per million output tokens."""
    steps: int


def summarize(result: SimulationResult, objective: Objective) -> SimulationReport:
    jobs, config = result.jobs, result.config
    output = sum(job.output_tokens for job in jobs)
    prompts = sum(job.prompt_tokens for job in jobs)
    seconds = result.seconds
    met = sum(objective.is_met(job.ttft, job.tpot) for job in jobs)
    rate = output / seconds if seconds else 0.0
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
        utilisation=sum(result.busy_seconds) / (config.workers * seconds) if seconds else 0.0,
        attainment=met / (len(jobs) + result.rejected),
        dollars=config.price_per_hour * seconds / 3600.0,
        dollars_per_million=dollars_per_million(config.price_per_hour, rate) if rate else 0.0,
        steps=result.steps,
    )
