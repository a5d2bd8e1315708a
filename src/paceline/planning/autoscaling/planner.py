"""The planner: sizes of the pools of a running cluster, from observations, with reasons. Pure: no I/O, no clock.

The size is the smallest that would have met the objective for the load of the last minutes (`hold`), followed by the load that
is expected until a worker that starts now is ready. That load runs through a queue (`replay.py`), so a burst counts by the
requests that it makes wait. A factor on the load explains the misses that were seen. The reaction loop adds workers for a queue
that the present ones cannot clear in time.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

from paceline.planning.autoscaling.capacity import Capacity
from paceline.planning.autoscaling.decision import Decision, PlannerConfig
from paceline.planning.autoscaling.forecast import Forecast, Prediction
from paceline.planning.autoscaling.history import MIN_REQUESTS, Lengths, LoadHistory, problem
from paceline.planning.autoscaling.observation import Observation, Role, Sizes
from paceline.planning.autoscaling.replay import Span, load_factor, smallest_pool
from paceline.planning.sizing.placement import placements

UPPER_SHARE = 0.5
"""Share of past forecasts that the expected load would have covered."""
MAX_GAP = 10.0
"""Intervals after which the time since the last observation is a gap, and forecasts start again."""
DECISIONS = 200
"""Decisions that a planner remembers."""


class Planner:
    """`decide` takes one observation and returns the sizes; `decisions` holds the last ones with their reasons."""

    def __init__(self, config: PlannerConfig, capacity: Capacity | None = None) -> None:
        """`capacity`: of the same profile, objective and speculation; planners that share one simulate a shape once."""
        self.config = config
        self._capacity = capacity or Capacity(config.profile, config.objective, config.speculation)
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
        return sum((one > 0) != (other > 0) for one, other in pairwise(steps))

    def scenario(self, now: float, predicted: Prediction) -> Sequence[Span]:
        """The load that the size is for: that of the last minutes, and the forecast."""
        ahead = Span(predicted.upper, self.config.interval * self.horizon)
        return [*self._history.spans, ahead]

    def _decide(self, seen: Observation) -> Decision:
        config, objective = self.config, self.config.objective
        before = {role: pool.coming for role, pool in seen.pools.items() if pool.coming or role == "target"}
        size = before.get("target", 0)
        wrong = problem(seen, self._last_time)
        if wrong is not None:
            return self._kept(seen, before, "invalid", f"Ignored an observation: {wrong}.", 0.0, 0.0, True)
        if self._last_time is not None and seen.time - self._last_time > MAX_GAP * config.interval:
            self._forecast = self._new_forecast()
            self._history.clear()
            self._needed.clear()
        self._last_time = seen.time
        load = seen.arrivals / seen.seconds
        self._forecast.add(load)
        self._lengths.add(seen)
        self._history.add(seen, self._lengths.weight(seen))
        shape = self._lengths.shape
        if shape is None:
            reason = f"Fewer than {MIN_REQUESTS} requests have ended: lengths are not known."
            return self._kept(seen, before, "steady", reason, load, load, True)
        capacity = self._capacity.requests_per_second(shape)
        predicted = self._forecast.predict(UPPER_SHARE)
        expected = predicted.upper
        if capacity <= 0.0:
            reason = (
                "A single request misses the objective, so more workers do not help. Relax it, or change the worker."
            )
            return self._kept(seen, before, "limits", reason, load, expected, False)
        patience = min(objective.ttft, config.profile.start_seconds.value)
        factor = load_factor(self._history.spans, capacity, patience, self._history.missed)
        most = max(config.fewest, 2 * config.limits.workers)  # beyond the limits, so that a lack is reported
        sizes_of = range(config.fewest, most + 1)
        scenario = self.scenario(seen.time, predicted)
        needed = smallest_pool(scenario, capacity, patience, 1.0 - objective.share, sizes_of, factor)
        seconds = sum(span.seconds for span in self._history.spans)
        past = f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
        cause, reason = (
            "forecast",
            (
                f"{needed} workers meet the objective for the load of the last {past} and the "
                f"{expected:.2f} requests/s that are expected ({predicted.method}); a worker serves {capacity / factor:.2f}/s."
            ),
        )
        reacted = self._reaction(seen, capacity, load)
        if reacted > needed and reacted > size:
            needed, cause = reacted, "queue"
            reason = f"{seen.waiting} requests wait for a first token: the present workers cannot serve them in time."
        self._needed.append(needed)
        if needed < size:
            needed = min(size, max(self._needed)) if self._history.is_long else size
            cause, reason = "idle", f"{needed} workers would have carried the load of the last {past}."
            if needed == size:
                cause, reason = "steady", "A smaller pool would not have carried the load of the last minutes."
        elif needed == size:
            cause = "steady"
        sizes = self._within_limits(needed, before, seen)
        is_enough = sizes["target"] >= needed
        if not is_enough:
            reason += f" The limits allow {sizes['target']} of {needed} workers."
            cause = "limits"
        return self._made(seen, sizes, before, cause, reason, load, expected, is_enough, capacity)

    def _kept(
        self,
        seen: Observation,
        before: Mapping[Role, int],
        cause: str,
        reason: str,
        load: float,
        forecast: float,
        is_enough: bool,
    ) -> Decision:
        """No change of the sizes, except to the limits."""
        kept = self._within_limits(max(self.config.fewest, before.get("target", 0)), before, seen)
        return self._made(seen, kept, before, cause, reason, load, forecast, is_enough)

    def _reaction(self, seen: Observation, capacity: float, load: float) -> int:
        """Workers that clear the queue within a start-up time besides the present load."""
        patience = max(self.config.interval, min(self.config.objective.ttft, self.config.profile.start_seconds.value))
        usual = max(1.0, load * min(self.config.objective.ttft, self.config.interval))
        queued = max(0.0, seen.waiting - usual)
        return math.ceil((load + queued / patience) / capacity - 1e-9)

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
        speculation, shape = self.config.speculation, self._lengths.shape
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
        return Forecast(self.horizon, None if period is None else round(period / self.config.interval))
