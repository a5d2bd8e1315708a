"""Seconds that one method takes to draft, c0 + c1 * depth: decayed least squares for each scale (power of two) of the batch.

With samples of one depth, c0 and c1 cannot be separated. A small penalty on c0 then makes time proportional to depth: right
for an autoregressive draft, pessimistic for one that drafts all tokens in a single pass, until a second depth is measured.
`has_slope` is true if one was.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.policy.cost.curve import LinearCost, LinearFit

_DECAY = 1.0 - 1.0 / 32.0
_PENALTY = 0.02
_SETTLED_SAMPLES = 2
_CALIBRATED_DEPTHS = (1, 4)
"""Depths for which a warm-up counts as a sample."""
_MAX_RATIO = 4.0
"""Measured over expected time above which a sample is clipped, and under whose inverse the old samples are discarded."""
_CALIBRATED_RATIO = 1.5
"""The same limit after a warm-up, which has measured drafts before."""


@dataclass(slots=True)
class _Samples:
    """The times of one scale of the batch."""

    fit: LinearFit = field(default_factory=lambda: LinearFit(_DECAY))
    shallowest: int = sys.maxsize

    def add(self, depth: int, seconds: float) -> None:
        self.fit.add(depth, seconds)
        self.shallowest = min(self.shallowest, depth)

    def line(self) -> LinearCost:
        return self.fit.cost(_PENALTY)


class DraftTime:
    """Learns the drafting time of one method."""

    def __init__(self) -> None:
        self._scales: dict[int, _Samples] = {}
        self._was_idle = True
        self._num_samples = 0
        self._max_ratio = _MAX_RATIO

    def calibrate(self, lines: Mapping[int, LinearCost]) -> None:
        """Start from the lines of a warm-up, by number of sequences."""
        for batch, line in lines.items():
            samples = self._scales[batch.bit_length()] = _Samples()
            for depth in _CALIBRATED_DEPTHS:
                samples.add(depth, line.seconds(depth))
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
        samples = self._scales.setdefault(scale, _Samples())
        # HAZARD: the first draft may compile and load. No sample is too short: if a draft at least as deep takes a small
        # part of the expected time, the old samples did not measure drafting.
        if samples.shallowest <= depth and seconds < samples.line().seconds(samples.shallowest) / _MAX_RATIO:
            samples = self._scales[scale] = _Samples()
        samples.add(depth, seconds)

    def line(self, batch: int) -> LinearCost | None:
        """None until something was measured. A scale without samples uses the nearest."""
        return self._nearest(batch).line() if self._scales else None

    def has_slope(self, batch: int) -> bool:
        """Whether `line` rests on more than one depth."""
        return bool(self._scales) and self._nearest(batch).fit.has_spread(_PENALTY)

    def _nearest(self, batch: int) -> _Samples:
        scale = batch.bit_length()
        return self._scales[min(self._scales, key=lambda seen: (abs(seen - scale), seen))]
