"""Seconds as a function of target rows: straight lines between measured points that never slope down."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import pairwise

Point = tuple[float, float, float]
"""rows, seconds, weight"""


class Curve:
    """Left of the first point the curve is flat. Right of the last it keeps the slope of the last doubling of rows,
    at most that of proportional cost: a pass over twice the rows never takes more than twice as long. One point alone
    extends flat, which invites the first draft and with it the first measurement."""

    def __init__(self, points: Iterable[Point]) -> None:
        rows, seconds = _isotonic(sorted(points))
        if not rows:
            raise ValueError("a curve needs at least one point")
        back = max(0, bisect_right(rows, rows[-1] / 2.0) - 1)
        run = rows[-1] - rows[back]
        rise = (seconds[-1] - seconds[back]) / run if run > 0.0 else 0.0
        self._rows, self._seconds = rows, seconds
        self._slope = min(rise, seconds[-1] / rows[-1])
        slopes = [
            0.0,
            *((t1 - t0) / (r1 - r0) for (r0, t0), (r1, t1) in pairwise(zip(rows, seconds, strict=True))),
            self._slope,
        ]
        self.bends = [at for at, (left, right) in zip(rows, pairwise(slopes), strict=True) if right > left]
        """Rows from which on each further row costs more than those before, ascending."""

    def __call__(self, rows: float) -> float:
        i = bisect_left(self._rows, rows)
        if i == len(self._rows):
            return self._seconds[-1] + self._slope * (rows - self._rows[-1])
        right = self._seconds[i]
        if i == 0:
            return right
        left, start = self._seconds[i - 1], self._rows[i - 1]
        return left + (right - left) * (rows - start) / (self._rows[i] - start)


def _isotonic(points: list[Point]) -> tuple[list[float], list[float]]:
    """Pool adjacent violators: the closest non-decreasing seconds in weighted least squares."""
    blocks: list[tuple[float, float, int]] = []  # mean seconds, weight, how many points
    for _, seconds, weight in points:
        size = 1
        while blocks and blocks[-1][0] > seconds:
            earlier, mass, count = blocks.pop()
            seconds = (seconds * weight + earlier * mass) / (weight + mass)
            weight += mass
            size += count
        blocks.append((seconds, weight, size))
    return [point[0] for point in points], [seconds for seconds, _, size in blocks for _ in range(size)]
