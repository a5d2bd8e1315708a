"""Figures of a profile: a number or a curve, with where it comes from."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Literal, get_args

from paceline.core.errors import InvalidConfig

Origin = Literal["measured", "assumed"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)


def _check(origin: str, name: str) -> None:
    if origin not in ORIGINS:
        raise InvalidConfig(f"{name}: origin must be one of {', '.join(ORIGINS)}, got {origin!r}")


@dataclass(frozen=True, slots=True)
class ProfileValue:
    """A number of at least 0."""

    value: float
    origin: Origin
    source: str = ""
    """Command or document that gave the number."""

    def __post_init__(self) -> None:
        _check(self.origin, "figure")
        if not isfinite(self.value) or self.value < 0.0:
            raise InvalidConfig(f"a figure of a profile must be a finite number of at least 0, got {self.value}")


@dataclass(frozen=True, slots=True)
class ProfileCurve:
    """Seconds by a count: rows of a pass, or sequences of a draft step."""

    points: tuple[tuple[int, float], ...]
    """(count, seconds), by increasing count."""
    origin: Origin
    source: str = ""

    def __post_init__(self) -> None:
        _check(self.origin, "curve")
        counts = [count for count, _ in self.points]
        if not counts or counts[0] < 1 or any(low >= high for low, high in pairwise(counts)):
            raise InvalidConfig(f"a curve needs points with increasing counts of at least 1, got {counts}")
        if not all(isfinite(seconds) and seconds > 0.0 for _, seconds in self.points):
            raise InvalidConfig("the seconds of a curve must be finite and above 0")

    def at(self, count: float) -> float:
        """Linear between points, constant before the first, and in proportion to the count after the last."""
        i = bisect_left(self.points, (count, 0.0))
        if i == 0:
            return self.points[0][1]
        low, before = self.points[i - 1]
        if i == len(self.points):
            return before * count / low
        high, after = self.points[i]
        return before + (after - before) * (count - low) / (high - low)
