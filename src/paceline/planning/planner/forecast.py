"""Forecasts of a rate, and what a planner remembers of past observations. The functions are pure.

`Forecast` has several methods, and uses the one with the smallest error so far. `Lengths` holds the lengths of requests, and
`LoadHistory` the load by interval and the misses.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from paceline.planning import Observation, WorkerProfile
from paceline.planning.planner.capacity import RequestShape
from paceline.planning.planner.replay import TrafficSpan

HISTORY = 240
"""Values that a forecast remembers."""
ERRORS = 60
"""Errors by which methods are compared."""
MIN_ERRORS = 5
"""Known errors of a method from which it can be the best."""


class Method(Protocol):
    name: str

    def add(self, value: float) -> None: ...

    def ahead(self, steps: int) -> float:
        """The expected value `steps` steps after the last value."""
        ...


class LastValue:
    name = "last value"

    def __init__(self) -> None:
        self._value = 0.0

    def add(self, value: float) -> None:
        self._value = value

    def ahead(self, steps: int) -> float:
        return self._value


class SmoothedMean:
    name = "mean"

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._value: float | None = None

    def add(self, value: float) -> None:
        self._value = value if self._value is None else self._value + self._weight * (value - self._value)

    def ahead(self, steps: int) -> float:
        return self._value or 0.0


class Trend:
    """Holt's method: a level and a trend, which is damped so that a long horizon does not run away."""

    name = "trend"

    def __init__(self, level: float = 0.4, trend: float = 0.1, damping: float = 0.9) -> None:
        self._weights = level, trend
        self._damping = damping
        self._level: float | None = None
        self._trend = 0.0

    def add(self, value: float) -> None:
        if self._level is None:
            self._level = value
            return
        before, (level, trend) = self._level, self._weights
        expected = before + self._damping * self._trend
        self._level = expected + level * (value - expected)
        self._trend = self._damping * self._trend + trend * (self._level - before - self._damping * self._trend)

    def ahead(self, steps: int) -> float:
        grown = sum(self._damping**i for i in range(1, steps + 1)) * self._trend
        return max(0.0, (self._level or 0.0) + grown)


class Season:
    """The value of one period ago, corrected by the ratio of the present level to that of a period ago."""

    name = "season"

    def __init__(self, period: int) -> None:
        self._period = period
        self._values: deque[float] = deque(maxlen=2 * period)

    def add(self, value: float) -> None:
        self._values.append(value)

    def ahead(self, steps: int) -> float:
        values, period = self._values, self._period
        if len(values) < period + steps:
            return values[-1] if values else 0.0
        recent = sum(list(values)[-steps:])
        before = sum(list(values)[-period - steps : -period])
        old = values[-period + steps - 1] if steps <= period else values[-1]
        return old * (recent / before if before > 0.0 else 1.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    expected: float
    upper: float
    """Value that was not passed in the given share of the past forecasts."""
    method: str


@dataclass(slots=True)
class _Record:
    pending: deque[tuple[int, float]] = field(default_factory=deque)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=ERRORS))
    """Value less its forecast."""


class Forecast:
    """Forecasts `horizon` steps ahead. Every method forecasts at every step, and is judged when the value is known."""

    def __init__(self, horizon: int, period: int | None = None) -> None:
        """`period` is the number of steps of a season. None if no season is known."""
        self._horizon = max(1, horizon)
        self._methods: list[Method] = [LastValue(), SmoothedMean(), Trend()]
        if period is not None and period > 1:
            self._methods.append(Season(period))
        self._records = {method.name: _Record() for method in self._methods}
        self._step = 0
        self._values: deque[float] = deque(maxlen=HISTORY)

    def add(self, value: float) -> None:
        """The value of the next step; finite and at least 0."""
        self._step += 1
        self._values.append(value)
        for method in self._methods:
            record = self._records[method.name]
            while record.pending and record.pending[0][0] <= self._step:
                record.errors.append(value - record.pending.popleft()[1])
            method.add(value)
            record.pending.append((self._step + self._horizon, method.ahead(self._horizon)))

    def predict(self, share: float) -> Prediction:
        """The forecast of the best method, with an upper bound from its own errors."""
        if not self._values:
            return Prediction(0.0, 0.0, "none")
        judged = [method for method in self._methods if len(self._records[method.name].errors) >= MIN_ERRORS]
        best = min(judged, key=lambda method: _mean_size(self._records[method.name].errors), default=self._methods[0])
        expected = max(0.0, best.ahead(self._horizon))
        errors = sorted(self._records[best.name].errors)
        surplus = errors[min(len(errors) - 1, math.ceil(share * len(errors)))] if errors else 0.0
        return Prediction(expected, max(expected, expected + surplus, 0.0), best.name)


def _mean_size(errors: deque[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


MIN_REQUESTS = 20
"""Requests from which mean lengths are known."""
KEEP = 0.9
"""Weight of the old sums of lengths when an observation is added."""
USUAL_ROWS, USUAL_BATCH, USUAL_CONTEXT = 512, 32, 2000
"""Passes by which the work of two requests is compared."""


class Lengths:
    """Decaying sums of lengths."""

    def __init__(self, profile: WorkerProfile) -> None:
        self._row = profile.rows_seconds(0, USUAL_ROWS) / USUAL_ROWS
        self._token = profile.verify_seconds(USUAL_BATCH, 0, USUAL_BATCH * USUAL_CONTEXT) / USUAL_BATCH
        self._started = self._prompt = self._cached = self._finished = self._output = 0.0

    def add(self, seen: Observation) -> None:
        self._started = KEEP * self._started + seen.started
        self._prompt = KEEP * self._prompt + seen.started_tokens
        self._cached = KEEP * self._cached + min(seen.cached_tokens, seen.started_tokens)
        self._finished = KEEP * self._finished + seen.finished
        self._output = KEEP * self._output + seen.output_tokens

    @property
    def shape(self) -> RequestShape | None:
        """The mean request. None if too few requests have ended."""
        if self._started < MIN_REQUESTS or self._finished < MIN_REQUESTS:
            return None
        prompt = (self._prompt - self._cached) / self._started
        return RequestShape(max(1, round(prompt)), max(1, round(self._output / self._finished)))

    def weight(self, seen: Observation) -> float:
        """Work of an arrival of the observation relative to the mean request, by its prompt."""
        shape = self.shape
        if shape is None or not seen.arrivals or not self._prompt:
            return 1.0
        prompt = seen.prompt_tokens / seen.arrivals * (1.0 - self._cached / self._prompt)
        answer = shape.output * self._token
        return (prompt * self._row + answer) / (shape.prompt * self._row + answer)


class LoadHistory:
    """The load of the last `intervals`, and the requests that missed the objective in them."""

    def __init__(self, intervals: int) -> None:
        self._spans: deque[TrafficSpan] = deque(maxlen=intervals)
        self._ends: deque[tuple[int, int]] = deque(maxlen=intervals)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, seen: Observation, weight: float) -> None:
        ready = seen.pool("target").ready
        self._spans.append(TrafficSpan(seen.arrivals / seen.seconds, seen.seconds, ready, weight))
        self._ends.append((min(seen.missed, seen.finished), seen.finished))

    def clear(self) -> None:
        self._spans.clear()
        self._ends.clear()

    @property
    def spans(self) -> list[TrafficSpan]:
        return list(self._spans)

    @property
    def is_long(self) -> bool:
        """Whether it covers at least half of the intervals."""
        return 2 * len(self._spans) >= (self._spans.maxlen or 0)

    @property
    def missed(self) -> float:
        """Share of the finished requests that missed the objective."""
        finished = sum(count for _, count in self._ends)
        return sum(count for count, _ in self._ends) / finished if finished else 0.0


def problem(seen: Observation, last: float | None) -> str | None:
    """Why an observation cannot be used. None if it can. `last` is the time of the previous observation."""
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
