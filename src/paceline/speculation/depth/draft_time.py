"""Seconds one method takes to draft, c0 + c1 * depth: decayed least squares for each scale (power of two) of the batch.

With one depth seen, c0 and c1 cannot be told apart. A small penalty on c0 then makes time proportional to depth:
right for an autoregressive draft, cautious for one that drafts all its tokens in a single pass until a second depth
shows it: `knows_slope` says whether one has.
"""

import sys
from dataclasses import dataclass
from typing import NamedTuple

_DECAY = 1.0 - 1.0 / 32.0
_PENALTY = 0.02
_SETTLED = 2


class Line(NamedTuple):
    """Seconds of a draft: base + per_depth * depth."""

    base: float
    per_depth: float

    def seconds(self, depth: float) -> float:
        return self.base + self.per_depth * depth


@dataclass(slots=True)
class _Fit:
    n: float = 0.0
    d: float = 0.0
    dd: float = 0.0
    t: float = 0.0
    dt: float = 0.0
    shallowest: int = sys.maxsize

    def add(self, depth: int, seconds: float) -> None:
        self.n = self.n * _DECAY + 1.0
        self.d = self.d * _DECAY + depth
        self.dd = self.dd * _DECAY + depth * depth
        self.t = self.t * _DECAY + seconds
        self.dt = self.dt * _DECAY + depth * seconds
        self.shallowest = min(self.shallowest, depth)

    @property
    def has_spread(self) -> bool:
        """Whether the depths differ by enough to outweigh the penalty."""
        return self.n * self.dd - self.d * self.d > _PENALTY * self.dd

    def line(self) -> Line:
        """argmin sum (t - c0 - c1 d)^2 + penalty c0^2 with c0, c1 >= 0."""
        n = self.n + _PENALTY
        det = n * self.dd - self.d * self.d
        c0 = (self.t * self.dd - self.dt * self.d) / det
        c1 = (n * self.dt - self.d * self.t) / det
        if c1 < 0.0:
            return Line(self.t / self.n, 0.0)
        if c0 < 0.0:
            return Line(0.0, self.dt / self.dd)
        return Line(c0, c1)


class DraftTime:
    """`add` what drafting took, ask what it would take."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}
        self._was_idle = True
        self._num_samples = 0

    @property
    def is_settled(self) -> bool:
        """Whether more than one sample speaks for the line."""
        return self._num_samples >= _SETTLED

    def idle(self) -> None:
        """A step went by without drafting."""
        self._was_idle = True

    def caught_up(self) -> None:
        """It drafted, but what that took is not to be learned."""
        self._was_idle = False

    def add(self, batch: int, depth: int, seconds: float) -> None:
        self._num_samples += 1
        line, scale = self.line(batch), batch.bit_length()
        was_idle, self._was_idle = self._was_idle, False
        if line is not None:
            estimate = line.seconds(depth)
            # HAZARD: a draft that sat idle first catches up on what it missed. Its time is only an upper bound.
            if was_idle and seconds > estimate:
                return
            seconds = min(seconds, 4.0 * estimate)
        fit = self._fits.setdefault(scale, _Fit())
        # HAZARD: a first draft may compile and load, and take any time. None is too quick: what a draft no shallower now
        # takes a small part of was never the price.
        if fit.shallowest <= depth and seconds < fit.line().seconds(fit.shallowest) / 4.0:
            fit = self._fits[scale] = _Fit()
        fit.add(depth, seconds)

    def line(self, batch: int) -> Line | None:
        """None until something was measured. A scale never seen borrows from the nearest."""
        return self._nearest(batch).line() if self._fits else None

    def knows_slope(self, batch: int) -> bool:
        """Whether `line` rests on more than one depth."""
        return bool(self._fits) and self._nearest(batch).has_spread

    def _nearest(self, batch: int) -> _Fit:
        scale = batch.bit_length()
        return self._fits[min(self._fits, key=lambda seen: (abs(seen - scale), seen))]
