"""The planner: sizes of the pools of a running cluster, from observations, with reasons. Pure: no I/O, no clock.

The forecast loop provisions for the load that is expected when a worker that starts now is ready. The reaction loop adds
workers for a queue that the present ones cannot clear in time. Misses of the objective raise a margin on the load until as many
requests miss it as are allowed: it stands for bursts that the capacity does not know. A pool shrinks only if the load of the
last minutes would have fitted the smaller one.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.core.errors import InvalidRequest
from paceline.planning.autoscaling.capacity import Capacity, Shape
from paceline.planning.autoscaling.forecast import Forecast
from paceline.planning.autoscaling.observation import Observation, Role, Sizes
from paceline.planning.profiles.profile import WorkerProfile
from paceline.planning.simulation.config import Speculation
from paceline.planning.simulation.objective import Objective
from paceline.planning.sizing.candidate import Limits
from paceline.planning.sizing.placement import placements

UPPER_SHARE = 0.9
"""Share of past forecasts that the load for which workers are provisioned would have covered."""
MIN_REQUESTS = 20
"""Requests from which mean lengths are known."""
HOLD_SECONDS = 300.0
GAIN, MAX_CHANGE, MAX_MARGIN = 0.03, 0.1, 8.0
"""Change of the logarithm of the margin in an interval, per share of misses beyond the allowed one, and bounds."""
MAX_GAP = 10.0
"""Intervals after which the time since the last observation is a gap, and forecasts start again."""
DECISIONS = 200
"""Decisions that a planner remembers."""


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    profile: WorkerProfile
    objective: Objective
    limits: Limits = field(default_factory=Limits)
    speculation: Speculation | None = None
    interval: float = 10.0
    """Seconds between observations."""
    fewest: int = 1
    """Target workers that always serve."""
    period: float | None = None
    """Seconds of a season, such as a day; None: none is known."""
    hold: float = HOLD_SECONDS
    """Seconds over which a smaller pool would have carried the load before a pool shrinks."""

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
class Decision:
    """Sizes, and why."""

    time: float
    sizes: Mapping[Role, int]
    before: Mapping[Role, int]
    cause: str
    """`forecast`, `queue`, `missed`, `idle`, `steady`, `limits` or `invalid`."""
    reason: str
    load: float
    """Requests per second of the last interval."""
    forecast: float
    """Requests per second that the sizes are for."""
    capacity: float
    """Requests per second of one target worker within the objective; 0: not known."""
    dollars_per_hour: float
    is_enough: bool
    """Whether the sizes cover the forecast; if not, the limits forbid more."""

    @property
    def changes(self) -> bool:
        return any(self.sizes.get(role) != size for role, size in self.before.items())


class Planner:
    """`decide` takes one observation and returns the sizes; `decisions` holds the last ones with their reasons."""

    def __init__(self, config: PlannerConfig, capacity: Capacity | None = None) -> None:
        """`capacity`: of the same profile, objective and speculation; planners that share one simulate a shape once."""
        self.config = config
        self._capacity = capacity or Capacity(config.profile, config.objective, config.speculation)
        self._horizon = max(1, math.ceil(config.profile.start_seconds.value / config.interval)) + 1
        self._forecast = self._new_forecast()
        self._margin = 1.0
        """Factor on the expected load, at least 1."""
        held = max(2 * self._horizon, math.ceil(config.hold / config.interval))
        self._needed: deque[int] = deque(maxlen=held)
        """Target workers that recent observations needed."""
        self._totals = _Totals()
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
        return sum((one > 0) != (other > 0) for one, other in pairwise(steps))

    def _decide(self, seen: Observation) -> Decision:
        before = {role: pool.coming for role, pool in seen.pools.items() if pool.coming or role == "target"}
        size = before.get("target", 0)
        problem = _problem(seen, self._last_time)
        if problem is not None:
            kept = self._within_limits(max(self.config.fewest, size), before, seen)
            return self._made(seen, kept, before, "invalid", f"Ignored an observation: {problem}.", 0.0, 0.0, True)
        if self._last_time is not None and seen.time - self._last_time > MAX_GAP * self.config.interval:
            self._forecast = self._new_forecast()
            self._needed.clear()
        self._last_time = seen.time
        load = seen.arrivals / seen.seconds
        self._forecast.add(load)
        self._totals.add(seen)
        shape = self._totals.shape
        if shape is None:
            kept = self._within_limits(max(self.config.fewest, size), before, seen)
            reason = f"Fewer than {MIN_REQUESTS} requests have ended: lengths are not known."
            return self._made(seen, kept, before, "steady", reason, load, load, True)
        capacity = self._capacity.requests_per_second(shape)
        predicted = self._forecast.predict(UPPER_SHARE)
        if capacity <= 0.0:
            kept = self._within_limits(max(self.config.fewest, size), before, seen)
            reason = (
                "A single request misses the objective, so more workers do not help. Relax it, or change the worker."
            )
            return self._made(seen, kept, before, "limits", reason, load, predicted.upper, False)
        expected = max(predicted.upper, load)
        self._set_margin(seen)
        needed = max(self.config.fewest, math.ceil(self._margin * expected / capacity - 1e-9))
        cause, reason = (
            "forecast",
            (
                f"{expected:.2f} requests/s are expected within {self._horizon * self.config.interval:.0f} s "
                f"({predicted.method}); a worker serves {capacity:.2f}/s in the objective, less a margin of {self._margin:.2f}."
            ),
        )
        reacted = self._reaction(seen, capacity, load)
        if reacted > needed and reacted > size:
            needed, cause = reacted, "queue"
            reason = f"{seen.waiting} requests wait for a first token: the present workers cannot serve them in time."
        self._needed.append(needed)
        if needed < size:
            is_known = len(self._needed) == self._needed.maxlen
            needed = min(size, max(self._needed)) if is_known else size
            cause, reason = (
                "idle",
                f"{needed} workers would have carried the load of the last {len(self._needed)} intervals.",
            )
            if needed == size:
                cause, reason = "steady", "A smaller pool would not have carried the load of the last intervals."
        elif needed == size:
            cause = "steady"
        sizes = self._within_limits(needed, before, seen)
        is_enough = sizes["target"] >= needed
        if not is_enough:
            reason += f" The limits allow {sizes['target']} of {needed} workers."
            cause = "limits"
        return self._made(seen, sizes, before, cause, reason, load, expected, is_enough, capacity)

    def _reaction(self, seen: Observation, capacity: float, load: float) -> int:
        """Workers that clear the queue within a start-up time besides the present load."""
        patience = max(self.config.interval, min(self.config.objective.ttft, self.config.profile.start_seconds.value))
        usual = max(1.0, load * min(self.config.objective.ttft, self.config.interval))
        queued = max(0.0, seen.waiting - usual)
        return math.ceil((load + queued / patience) / capacity - 1e-9)

    def _set_margin(self, seen: Observation) -> None:
        """A share of misses above the allowed one raises the margin, one below lowers it."""
        if not seen.finished:
            return
        allowed = max(0.001, 1.0 - self.config.objective.share)
        change = GAIN * (min(1.0, seen.missed / seen.finished) / allowed - 1.0)
        factor = math.exp(min(MAX_CHANGE, max(-MAX_CHANGE, change)))
        self._margin = min(MAX_MARGIN, max(1.0, self._margin * factor))

    def _within_limits(self, targets: int, before: Mapping[Role, int], seen: Observation) -> dict[Role, int]:
        """The largest sizes up to these within the limits, workers that drain included; drafts shrink first."""
        config, limits = self.config, self.config.limits
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
        """Draft workers for so many targets: none where a pool is not the cheapest placement."""
        speculation, shape = self.config.speculation, self._totals.shape
        if speculation is None or shape is None:
            return seen.pool("draft").coming
        batch = max(1, round(seen.running / max(1, seen.pool("target").ready)))
        best = placements(self.config.profile, speculation, batch, batch * (shape.prompt + shape.output / 2.0))[0]
        return math.ceil(targets / best.targets_per_draft) if best.placement == "pool" else 0

    def _made(
        self,
        seen: Observation,
        sizes: Mapping[Role, int],
        before: Mapping[Role, int],
        cause: str,
        reason: str,
        load: float,
        forecast: float,
        is_enough: bool,
        capacity: float = 0.0,
    ) -> Decision:
        dollars = self.config.dollars(sizes["target"], sizes.get("prefill", 0), sizes.get("draft", 0))
        return Decision(seen.time, sizes, before, cause, reason, load, forecast, capacity, dollars, is_enough)

    def _new_forecast(self) -> Forecast:
        period = self.config.period
        return Forecast(self._horizon, None if period is None else round(period / self.config.interval))


class _Totals:
    """Decaying sums of lengths."""

    KEEP = 0.9

    def __init__(self) -> None:
        self._started = self._prompt = self._cached = self._finished = self._output = 0.0

    def add(self, seen: Observation) -> None:
        keep = self.KEEP
        self._started = keep * self._started + seen.started
        self._prompt = keep * self._prompt + seen.started_tokens
        self._cached = keep * self._cached + min(seen.cached_tokens, seen.started_tokens)
        self._finished = keep * self._finished + seen.finished
        self._output = keep * self._output + seen.output_tokens

    @property
    def shape(self) -> Shape | None:
        if self._started < MIN_REQUESTS or self._finished < MIN_REQUESTS:
            return None
        prompt = (self._prompt - self._cached) / self._started
        return Shape(max(1, round(prompt)), max(1, round(self._output / self._finished)))


def _problem(seen: Observation, last: float | None) -> str | None:
    """Why an observation cannot be used; None if it can."""
    numbers = (seen.time, seen.seconds, seen.kv_use, seen.busy)
    if not all(map(math.isfinite, numbers)):
        return "a figure is not finite"
    if seen.seconds <= 0.0 or (last is not None and seen.time <= last):
        return "its time does not follow the last one"
    counts = (
        seen.arrivals,
        seen.prompt_tokens,
        seen.cached_tokens,
        seen.started,
        seen.started_tokens,
        seen.finished,
        seen.output_tokens,
        seen.missed,
        seen.waiting,
        seen.running,
    )
    if not all(math.isfinite(count) and count >= 0 for count in counts):
        return "a count is negative or not finite"
    return None
