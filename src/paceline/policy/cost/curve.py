"""What measurements are summed up by: a curve through points, a line of least squares, and a mean."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Beyond = Literal["flat", "proportional", "slope"]
ROUNDS_KEEP = 1.0 - 1.0 / 128.0
"""Weight of the earlier rounds when one is added: recent acceptance is that of about 128 rounds."""
DECAY = 0.9
"""Weight of the earlier measurements of a mean, unless it has another."""


class Curve:
    """Straight lines between points, such as the seconds of a pass by its rows. The curve is flat before the first point.

    `beyond` is its form after the last point. `flat` is constant, and `proportional` grows with the argument. `slope` keeps the
    slope of the last doubling, at most that of `proportional`: a pass over twice the rows never takes more than twice as long.
    One point alone extends flat, which allows the first draft and with it the first measurement.
    """

    __slots__ = ("_is_proportional", "_slope", "_xs", "_ys", "bends")

    def __init__(self, points: Iterable[tuple[float, float]], beyond: Beyond) -> None:
        points = sorted(points)
        if not points:
            raise ValueError("a curve needs at least one point")
        xs, ys = [x for x, _ in points], [y for _, y in points]
        self._xs, self._ys, self._is_proportional = xs, ys, beyond == "proportional"
        self._slope = 0.0
        if beyond == "proportional":
            self._slope = ys[-1] / xs[-1]
        elif beyond == "slope":
            back = max(0, bisect_right(xs, xs[-1] / 2.0) - 1)
            run = xs[-1] - xs[back]
            rise = (ys[-1] - ys[back]) / run if run > 0.0 else 0.0
            self._slope = min(rise, ys[-1] / xs[-1])
        slopes = [0.0, *((y1 - y0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points)), self._slope]
        self.bends = [x for x, (left, right) in zip(xs, pairwise(slopes), strict=True) if right > left]
        """Arguments at which the slope rises, ascending."""

    def __call__(self, x: float) -> float:
        xs = self._xs
        i = bisect_left(xs, x)
        if i == len(xs):
            last, value = xs[-1], self._ys[-1]
            return value * x / last if self._is_proportional else value + self._slope * (x - last)
        right = self._ys[i]
        if i == 0 or xs[i] == x:
            return right
        left, start = self._ys[i - 1], xs[i - 1]
        return left + (right - left) * (x - start) / (xs[i] - start)


def isotonic(points: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Pool adjacent violators: the (x, y) whose y never decrease and are closest to those of the points (x, y, weight) in
    weighted least squares."""
    ordered = sorted(points)
    blocks: list[tuple[float, float, int]] = []  # mean y, weight, number of points
    for _, y, weight in ordered:
        size = 1
        while blocks and blocks[-1][0] > y:
            earlier, mass, count = blocks.pop()
            y = (y * weight + earlier * mass) / (weight + mass)
            weight += mass
            size += count
        blocks.append((y, weight, size))
    ys = [y for y, _, size in blocks for _ in range(size)]
    return [(x, y) for (x, _, _), y in zip(ordered, ys, strict=True)]


class LinearCost(NamedTuple):
    """Seconds of a draft: base + per_depth * depth."""

    base: float
    per_depth: float

    def seconds(self, depth: float) -> float:
        return self.base + self.per_depth * depth


@dataclass(slots=True)
class LinearFit:
    """A line through measurements (x, y), by decaying sums."""

    keep: float
    """Weight of the earlier measurements when one is added."""
    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.n = self.n * self.keep + 1.0
        self.x = self.x * self.keep + x
        self.xx = self.xx * self.keep + x * x
        self.y = self.y * self.keep + y
        self.xy = self.xy * self.keep + x * y

    def has_spread(self, penalty: float) -> bool:
        """Whether the x differ by enough to outweigh the penalty of `cost`."""
        return self.n * self.xx - self.x * self.x > penalty * self.xx

    def cost(self, penalty: float) -> LinearCost:
        """argmin sum (y - c0 - c1 x)^2 + penalty c0^2 with c0, c1 >= 0."""
        n = self.n + penalty
        det = n * self.xx - self.x * self.x
        c0 = (self.y * self.xx - self.xy * self.x) / det
        c1 = (n * self.xy - self.x * self.y) / det
        if c1 < 0.0:
            return LinearCost(self.y / self.n, 0.0)
        if c0 < 0.0:
            return LinearCost(0.0, self.xy / self.xx)
        return LinearCost(c0, c1)

    def at(self, x: float, min_variance: float) -> float:
        """y at x, at least 0, on a line that never falls. The line is flat if the x of the measurements vary less than
        `min_variance`: then noise alone decides the slope."""
        mean_x, mean_y = self.x / self.n, self.y / self.n
        variance = self.xx / self.n - mean_x * mean_x
        covariance = self.xy / self.n - mean_x * mean_y
        slope = max(0.0, covariance / variance) if variance > min_variance else 0.0
        return max(0.0, mean_y + slope * (x - mean_x))


@dataclass(slots=True)
class DecayingMean:
    """A ratio of decaying sums, such as seconds per token."""

    total: float = 0.0
    weight: float = 0.0
    measured: float = 0.0
    """Time of the last measurement."""
    keep: float = DECAY
    """Weight of the earlier measurements when one is added."""

    def add(self, amount: float, weight: float, now: float = 0.0) -> None:
        self.total = self.keep * self.total + amount
        self.weight = self.keep * self.weight + weight
        self.measured = now

    def value(self, default: float) -> float:
        return self.total / self.weight if self.weight else default
