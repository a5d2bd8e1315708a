"""What a target worker can serve, by simulation, and where its drafts are cheapest. The functions are pure.

`WorkerCapacity` is the requests per second at which a worker meets an objective. `placements` lists where drafts can be made:
nowhere, on the device of the target, or in a pool that several targets share.
"""

from dataclasses import dataclass, replace

from paceline.planning import WorkerProfile
from paceline.planning.planner.sizing import Placement
from paceline.planning.simulator import Objective, Rounds, simulate, summarize
from paceline.planning.simulator.settings import SimulationConfig, Speculation
from paceline.planning.traces import TrafficPattern, synthesize

WORKERS = 4
"""Workers of the simulated cluster."""
REQUESTS = 240
"""Requests of one simulation, about."""
ROUNDS = 12
"""Halvings of the interval that holds the capacity."""
GRAIN = 1.25
"""Lengths within this ratio share a capacity."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Mean lengths of requests, in tokens."""

    prompt: int
    """Tokens to compute: without those found in a cache."""
    output: int
    spread: float = 1.0
    """Deviation of lengths over their mean."""


class WorkerCapacity:
    """Simulates a shape once; further calls with similar lengths return the same figure."""

    def __init__(self, profile: WorkerProfile, objective: Objective, speculation: Speculation | None) -> None:
        self._config = SimulationConfig(profile, WORKERS, speculation=speculation, router="least_loaded")
        self._objective = objective
        self._known: dict[RequestShape, float] = {}

    def requests_per_second(self, shape: RequestShape) -> float:
        """Of one worker; 0 if even a single request at a time misses the objective."""
        key = RequestShape(_rounded(shape.prompt), _rounded(shape.output), round(shape.spread, 1))
        if key not in self._known:
            self._known[key] = self._measure(key)
        return self._known[key]

    def _measure(self, shape: RequestShape) -> float:
        alone = self._seconds_alone(shape)
        low, high = 0.0, 4.0 * int(self._config.profile.max_num_seqs.value) / alone
        for _ in range(ROUNDS):
            # The interval is wide: the geometric mean, or a small part of it while nothing is known to fit
            middle = (low * high) ** 0.5 if low else high / 16.0
            if self._meets(shape, middle):
                low = middle
            else:
                high = middle
            if low and high / low < 1.05:
                break
        return low

    def _seconds_alone(self, shape: RequestShape) -> float:
        profile = self._config.profile
        return profile.prefill_seconds(shape.prompt) + shape.output * profile.verify_seconds(1, 0, shape.prompt)

    def _meets(self, shape: RequestShape, rate: float) -> bool:
        total = rate * WORKERS
        traffic = TrafficPattern(total, shape.prompt, shape.output, shape.spread)
        trace = synthesize(traffic, max(REQUESTS / total, 4.0 * self._seconds_alone(shape)), seed=1)
        report = summarize(simulate(replace(self._config, seed=1), trace), self._objective)
        return report.attainment >= self._objective.share


def _rounded(tokens: int) -> int:
    """The nearest power of `GRAIN`."""
    value = 1.0
    while value * GRAIN**0.5 < tokens:
        value *= GRAIN
    return max(1, round(value))


TARGETS_PER_DRAFT = (1, 2, 4, 8)
"""Numbers of targets that may share a draft worker."""


@dataclass(frozen=True, slots=True)
class DraftPlacement:
    placement: Placement
    targets_per_draft: int
    """Targets that share a draft worker; 0 without a pool."""
    cost: float
    """Dollars per token, relative to plain decoding."""


def placements(profile: WorkerProfile, speculation: Speculation, batch: int, context: float) -> list[DraftPlacement]:
    """All placements for targets with `batch` sequences and `context` tokens each, in a steady state; the cheapest first."""
    reading = profile.context_seconds.value * context
    plain = batch / profile.verify_seconds(batch, 0, context)
    ratio = profile.draft_price_per_hour.value / profile.price_per_hour.value if profile.price_per_hour.value else 1.0

    def rate(rounds: Rounds, drafting: int) -> float:
        best = rounds.best(batch, context, drafting)
        return batch * best.tokens / (best.seconds + reading)

    found = [
        DraftPlacement("none", 0, 1.0),
        DraftPlacement("device", 0, plain / rate(Rounds(profile, speculation), batch)),
    ]
    remote = Rounds(profile, speculation, profile.round_trip_seconds.value)
    found += [
        DraftPlacement("pool", share, (1.0 + ratio / share) * plain / rate(remote, batch * share))
        for share in TARGETS_PER_DRAFT
    ]
    return sorted(found, key=lambda placement: placement.cost)
