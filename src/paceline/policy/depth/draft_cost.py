"""Seconds that one method takes to draft, c0 + c1 * depth: decayed least squares for each scale (power of two) of the batch.

With samples of one depth, c0 and c1 cannot be separated. A small penalty on c0 then makes time proportional to depth: right
for an autoregressive draft, pessimistic for one that drafts all tokens in a single pass, until a second depth is measured.
`has_slope` is true if one was.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_DECAY = 1.0 - 1.0 / 32.0
_PENALTY = 0.02
_SETTLED_SAMPLES = 2
_CALIBRATED_DEPTHS = (1, 4)
"""Depths for which a warm-up counts as a sample."""
_MAX_RATIO = 4.0
"""Measured over expected time above which a sample is clipped, and under whose inverse the old samples are discarded."""
_CALIBRATED_RATIO = 1.5
"""The same limit after a warm-up, which has measured drafts before."""


class LinearCost(NamedTuple):
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

    def line(self) -> LinearCost:
        """argmin sum (t - c0 - c1 d)^2 + penalty c0^2 with c0, c1 >= 0."""
        n = self.n + _PENALTY
        det = n * self.dd - self.d * self.d
        c0 = (self.t * self.dd - self.dt * self.d) / det
        c1 = (n * self.dt - self.d * self.t) / det
        if c1 < 0.0:
            return LinearCost(self.t / self.n, 0.0)
        if c0 < 0.0:
            return LinearCost(0.0, self.dt / self.dd)
        return LinearCost(c0, c1)


class DraftTime:
    """Learns the drafting time of one method."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}
        self._was_idle = True
        self._num_samples = 0
        self._max_ratio = _MAX_RATIO

    def calibrate(self, lines: Mapping[int, LinearCost]) -> None:
        """Start from the lines of a warm-up, by number of sequences."""
        for batch, line in lines.items():
            fit = self._fits[batch.bit_length()] = _Fit()
            for depth in _CALIBRATED_DEPTHS:
                fit.add(depth, line.seconds(depth))
        self._num_samples, self._max_ratio = _SETTLED_SAMPLES, _CALIBRATED_RATIO

    @property
    def is_settled(self) -> bool:
        """Whether the line rests on more than one sample."""
        return self._num_samples >= _SETTLED_SAMPLES

    def skip_idle(self) -> None:
        """The method did not draft in a step."""
        self._was_idle = True

    def skip_untimed(self) -> None:
        """The method drafted in an untimed step."""
        self._was_idle = False

    def add(self, batch: int, depth: int, seconds: float) -> None:
        self._num_samples += 1
        line, scale = self.line(batch), batch.bit_length()
        was_idle, self._was_idle = self._was_idle, False
        if line is not None:
            expected = line.seconds(depth)
            # HAZARD: after an idle step the time includes what the draft had to catch up with: it is only an upper bound.
            if was_idle and seconds > expected:
                return
            seconds = min(seconds, self._max_ratio * expected)
        fit = self._fits.setdefault(scale, _Fit())
        # HAZARD: the first draft may compile and load. No sample is too short: if a draft at least as deep takes a small
        # part of the expected time, the old samples did not measure drafting.
        if fit.shallowest <= depth and seconds < fit.line().seconds(fit.shallowest) / _MAX_RATIO:
            fit = self._fits[scale] = _Fit()
        fit.add(depth, seconds)

    def line(self, batch: int) -> LinearCost | None:
        """None until something was measured. A scale without samples uses the nearest."""
        return self._nearest(batch).line() if self._fits else None

    def has_slope(self, batch: int) -> bool:
        """Whether `line` rests on more than one depth."""
        return bool(self._fits) and self._nearest(batch).has_spread

    def _nearest(self, batch: int) -> _Fit:
        scale = batch.bit_length()
        return self._fits[min(self._fits, key=lambda seen: (abs(seen - scale), seen))]
