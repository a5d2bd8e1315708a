"""Forecasts of a rate: several methods, of which the one with the smallest error so far is used. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

HISTORY = 240
"""Values that a forecast remembers."""
ERRORS = 60
"""Errors by which methods are compared."""
MIN_ERRORS = 5


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
