"""The planner: sizes of the pools of a running cluster, from observations, with reasons. It does no I/O and reads no clock.

The size is the smallest that would have met the objective for the load of the last minutes (`hold`), followed by the load that
is expected until a worker that starts now is ready. That load runs through a queue (`replay.py`), so a burst counts by the
requests that it makes wait. A factor on the load explains the misses that were seen. The reaction loop adds workers for a queue
that the present ones cannot clear in time.

`PlannerConfig` holds the settings. A `Decision` has the sizes and their reasons.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from paceline.core.errors import InvalidRequest
from paceline.core.pool_config import Role
from paceline.planning import Observation, Sizes, WorkerProfile
from paceline.planning.planner.capacity import WorkerCapacity, placements
from paceline.planning.planner.forecast import MIN_REQUESTS, Forecast, Lengths, LoadHistory, Prediction, problem
from paceline.planning.planner.replay import TrafficSpan, load_factor, smallest_pool
from paceline.planning.planner.sizing import ClusterLimits
from paceline.planning.simulator import Objective
from paceline.planning.simulator.settings import Speculation

HOLD_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    profile: WorkerProfile
    objective: Objective
    limits: ClusterLimits = field(default_factory=ClusterLimits)
    speculation: Speculation | None = None
    interval: float = 10.0
    """Seconds between observations."""
    fewest: int = 1
    """Target workers that always serve."""
    period: float | None = None
    """Seconds of a season, such as a day. None if no season is known."""
    hold: float = HOLD_SECONDS
    """Seconds of past load that a pool must be able to carry, with its bursts, before it shrinks."""

    def __post_init__(self) -> None:
        if not (self.interval > 0.0 and math.isfinite(self.interval)) or self.fewest < 1:
            raise InvalidRequest("a planner needs an interval above 0 and at least 1 worker", field="planner")
        if self.dollars(self.fewest) > self.limits.dollars_per_hour or self.fewest > self.limits.workers:
            raise InvalidRequest(f"{self.fewest} target workers are over the limits: raise them", field="limits")

    def dollars(self, targets: int, prefills: int = 0, drafts: int = 0) -> float:
        """Dollars per hour."""
        price = self.profile.price_per_hour.value
        return (targets + prefills) * price + drafts * self.profile.draft_price_per_hour.value


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests per second that a decision is based on."""

    load: float = 0.0
    """The rate in the last interval."""
    forecast: float = 0.0
    """The rate that is expected when a worker that starts now is ready."""
    capacity: float = 0.0
    """The rate of one target worker within the objective. 0 if it is not known."""


@dataclass(frozen=True, slots=True)
class Need:
    """Target workers that the load needs, before the limits, and why."""

    targets: int
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Sizes, and why."""

    time: float
    sizes: Mapping[Role, int]
    before: Mapping[Role, int]
    cause: str
    """`forecast`, `queue`, `idle`, `steady`, `limits` or `invalid`."""
    reason: str
    load: float
    """Requests per second of the last interval."""
    forecast: float
    """Requests per second that are expected when a worker that starts now is ready."""
    capacity: float
    """Requests per second of one target worker within the objective. 0 if it is not known."""
    dollars_per_hour: float
    is_enough: bool
    """Whether the sizes cover the load; if not, the limits forbid more."""

    @property
    def changes(self) -> bool:
        return any(self.sizes.get(role) != size for role, size in self.before.items())


UPPER_SHARE = 0.5
"""Share of past forecasts that the expected load would have covered."""
MAX_GAP = 10.0
"""Intervals after which the time since the last observation is a gap, and forecasts start again."""
DECISIONS = 200
"""Decisions that a planner remembers."""


class Planner:
    """`decide` takes one observation and returns the sizes; `decisions` holds the last ones with their reasons."""

    def __init__(self, config: PlannerConfig, capacity: WorkerCapacity | None = None) -> None:
        """`capacity` has the same profile, objective and speculation. Planners that share it simulate a shape once."""
        self.config = config
        self._capacity = capacity or WorkerCapacity(config.profile, config.objective, config.speculation)
        self.horizon = max(1, math.ceil(config.profile.start_seconds.value / config.interval)) + 1
        """Intervals until a worker that starts now serves."""
        self._forecast = self._new_forecast()
        self._history = LoadHistory(max(2 * self.horizon, math.ceil(config.hold / config.interval)))
        self._needed: deque[int] = deque(maxlen=2 * self.horizon)
        """Target workers that the last observations needed."""
        self._lengths = Lengths(config.profile)
        self._last_time: float | None = None
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)

    @property
    def interval(self) -> float:
        return self.config.interval

    def decide(self, observation: Observation) -> Sizes:
        decision = self._decide(observation)
        self.decisions.append(decision)
        return decision.sizes

    @property
    def direction_changes(self) -> int:
        """Times that the target pool grew after it shrank, or the reverse."""
        sizes = [decision.sizes.get("target", 0) for decision in self.decisions]
        steps = [after - before for before, after in pairwise(sizes) if after != before]
        return sum((before > 0) != (after > 0) for before, after in pairwise(steps))

    def scenario(self, now: float, predicted: Prediction) -> Sequence[TrafficSpan]:
        """The load that the size is for: that of the last minutes, and the forecast."""
        ahead = TrafficSpan(predicted.upper, self.config.interval * self.horizon)
        return [*self._history.spans, ahead]

    def _decide(self, seen: Observation) -> Decision:
        wrong = problem(seen, self._last_time)
        if wrong is not None:
            return self._keep(seen, Rates(), "invalid", f"Ignored an observation: {wrong}.")
        self._observe(seen)
        load, shape = seen.arrivals / seen.seconds, self._lengths.shape
        if shape is None:
            reason = f"Fewer than {MIN_REQUESTS} requests have ended: lengths are not known."
            return self._keep(seen, Rates(load, load), "steady", reason)
        capacity = self._capacity.requests_per_second(shape)
        predicted = self._forecast.predict(UPPER_SHARE)
        if capacity <= 0.0:
            reason = (
                "A single request misses the objective, so more workers do not help. Relax it, or change the worker."
            )
            return self._keep(seen, Rates(load, predicted.upper), "limits", reason, is_enough=False)
        rates = Rates(load, predicted.upper, capacity)
        need = self._larger_for_queue(self._need(seen, predicted, capacity), seen, rates)
        self._needed.append(need.targets)
        return self._resize(seen, rates, self._held(need, seen.pool("target").ready_or_starting))

    def _observe(self, seen: Observation) -> None:
        """Add the observation to the forecast, the lengths and the history. A long gap starts all but the lengths again."""
        if self._last_time is not None and seen.time - self._last_time > MAX_GAP * self.config.interval:
            self._forecast = self._new_forecast()
            self._history.clear()
            self._needed.clear()
        self._last_time = seen.time
        self._forecast.add(seen.arrivals / seen.seconds)
        self._lengths.add(seen)
        self._history.add(seen, self._lengths.weight(seen))

    def _need(self, seen: Observation, predicted: Prediction, capacity: float) -> Need:
        """The smallest pool that meets the objective for the load of the last minutes and the forecast."""
        config, objective = self.config, self.config.objective
        patience = min(objective.ttft, config.profile.start_seconds.value)
        factor = load_factor(self._history.spans, capacity, patience, self._history.missed)
        most = max(config.fewest, 2 * config.limits.workers)  # beyond the limits, so that a lack is reported
        sizes = range(config.fewest, most + 1)
        scenario = self.scenario(seen.time, predicted)
        needed = smallest_pool(scenario, capacity, patience, 1.0 - objective.share, sizes, factor)
        reason = (
            f"{needed} workers meet the objective for the load of the last {self._past} and the {predicted.upper:.2f} "
            f"requests/s that are expected ({predicted.method}); a worker serves {capacity / factor:.2f}/s."
        )
        return Need(needed, "forecast", reason)

    def _larger_for_queue(self, need: Need, seen: Observation, rates: Rates) -> Need:
        """The workers that clear the queue, if neither the present ones nor those of the forecast can."""
        clearing = self._clearing(seen, rates)
        if clearing <= max(need.targets, seen.pool("target").ready_or_starting):
            return need
        reason = f"{seen.waiting} requests wait for a first token: the present workers cannot serve them in time."
        return Need(clearing, "queue", reason)

    def _clearing(self, seen: Observation, rates: Rates) -> int:
        """Number of workers that serve the present load and also clear the queue within a start-up time."""
        patience = max(self.config.interval, min(self.config.objective.ttft, self.config.profile.start_seconds.value))
        usual = max(1.0, rates.load * min(self.config.objective.ttft, self.config.interval))
        queued = max(0.0, seen.waiting - usual)
        return math.ceil((rates.load + queued / patience) / rates.capacity - 1e-9)

    def _held(self, need: Need, size: int) -> Need:
        """A pool shrinks only to what the last observations needed, and only with a history that is long enough."""
        if need.targets > size:
            return need
        if need.targets == size:
            return replace(need, cause="steady")
        held = min(size, max(self._needed)) if self._history.is_long else size
        if held == size:
            return Need(size, "steady", "A smaller pool would not have carried the load of the last minutes.")
        return Need(held, "idle", f"{held} workers would have carried the load of the last {self._past}.")

    @property
    def _past(self) -> str:
        """The length of the history, in words."""
        seconds = sum(span.seconds for span in self._history.spans)
        return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"

    def _keep(self, seen: Observation, rates: Rates, cause: str, reason: str, is_enough: bool = True) -> Decision:
        """No change of the sizes, except to the limits."""
        sizes = self._within_limits(max(self.config.fewest, seen.pool("target").ready_or_starting), seen)
        return self._decision(seen, sizes, rates, cause, reason, is_enough)

    def _resize(self, seen: Observation, rates: Rates, need: Need) -> Decision:
        sizes = self._within_limits(need.targets, seen)
        if sizes["target"] >= need.targets:
            return self._decision(seen, sizes, rates, need.cause, need.reason)
        reason = f"{need.reason} The limits allow {sizes['target']} of {need.targets} workers."
        return self._decision(seen, sizes, rates, "limits", reason, is_enough=False)

    def _within_limits(self, targets: int, seen: Observation) -> dict[Role, int]:
        """The largest sizes up to these within the limits, workers that drain included; drafts shrink first."""
        config, limits, before = self.config, self.config.limits, _present(seen)
        sizes: dict[Role, int] = {"target": max(config.fewest, min(targets, limits.workers))}
        if before.get("prefill"):
            sizes["prefill"] = max(1, math.ceil(before["prefill"] * sizes["target"] / max(1, before.get("target", 1))))
        if before.get("draft") or self._wants_drafts(seen):
            sizes["draft"] = self._drafts(sizes["target"], seen)
        leaving = {role: pool.draining for role, pool in seen.pools.items()}

        def is_over() -> bool:
            used = {role: sizes.get(role, 0) + leaving.get(role, 0) for role in ("target", "prefill", "draft")}
            dollars = config.dollars(used["target"], used["prefill"], used["draft"])
            return sum(used.values()) > limits.workers or dollars > limits.dollars_per_hour

        for role, least in (("draft", 0), ("prefill", 0), ("target", config.fewest)):
            while is_over() and sizes.get(role, 0) > least:  # type: ignore[call-overload]
                sizes[role] -= 1  # type: ignore[index]
        return sizes

    def _wants_drafts(self, seen: Observation) -> bool:
        return self.config.speculation is not None and "draft" in seen.pools

    def _drafts(self, targets: int, seen: Observation) -> int:
        """Number of draft workers for `targets` targets, 0 if a pool is not the cheapest placement."""
        speculation, shape = self.config.speculation, self._lengths.shape
        if speculation is None or shape is None:
            return seen.pool("draft").ready_or_starting
        batch = max(1, round(seen.running / max(1, seen.pool("target").ready)))
        best = placements(self.config.profile, speculation, batch, batch * (shape.prompt + shape.output / 2.0))[0]
        return math.ceil(targets / best.targets_per_draft) if best.placement == "pool" else 0

    def _decision(
        self,
        seen: Observation,
        sizes: Mapping[Role, int],
        rates: Rates,
        cause: str,
        reason: str,
        is_enough: bool = True,
    ) -> Decision:
        dollars = self.config.dollars(sizes["target"], sizes.get("prefill", 0), sizes.get("draft", 0))
        load, forecast, capacity = rates.load, rates.forecast, rates.capacity
        return Decision(seen.time, sizes, _present(seen), cause, reason, load, forecast, capacity, dollars, is_enough)

    def _new_forecast(self) -> Forecast:
        period = self.config.period
        return Forecast(self.horizon, None if period is None else round(period / self.config.interval))


def _present(seen: Observation) -> dict[Role, int]:
    """Workers that serve now or will, by role; the target role is always there, if observed."""
    return {
        role: pool.ready_or_starting for role, pool in seen.pools.items() if pool.ready_or_starting or role == "target"
    }
