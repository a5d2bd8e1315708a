"""Seconds to draft, c0 + c1 * depth, fitted by decayed least squares for each scale (power of two) of the batch.

With one depth seen, c0 and c1 cannot be told apart. A small penalty on c0 then makes time proportional to depth:
right for an autoregressive draft, cautious for one that drafts all its tokens in a single pass until a second depth
shows it.
"""

from dataclasses import dataclass

_DECAY = 1.0 - 1.0 / 32.0
_PENALTY = 0.02


@dataclass(slots=True)
class _Fit:
    n: float = 0.0
    d: float = 0.0
    dd: float = 0.0
    t: float = 0.0
    dt: float = 0.0

    def add(self, depth: int, seconds: float) -> None:
        self.n = self.n * _DECAY + 1.0
        self.d = self.d * _DECAY + depth
        self.dd = self.dd * _DECAY + depth * depth
        self.t = self.t * _DECAY + seconds
        self.dt = self.dt * _DECAY + depth * seconds

    def line(self) -> tuple[float, float]:
        """argmin sum (t - c0 - c1 d)^2 + penalty c0^2 with c0, c1 >= 0."""
        n = self.n + _PENALTY
        det = n * self.dd - self.d * self.d
        c0 = (self.t * self.dd - self.dt * self.d) / det
        c1 = (n * self.dt - self.d * self.t) / det
        if c1 < 0.0:
            return self.t / self.n, 0.0
        if c0 < 0.0:
            return 0.0, self.dt / self.dd
        return c0, c1


class DraftTime:
    """`add` what drafting took, ask what it would take."""

    def __init__(self) -> None:
        self._fits: dict[int, _Fit] = {}
        self._was_idle = True

    def idle(self) -> None:
        """A step went by without drafting."""
        self._was_idle = True

    def add(self, batch: int, depth: int, seconds: float) -> None:
        line = self.line(batch)
        was_idle, self._was_idle = self._was_idle, False
        if line is not None:
            estimate = line[0] + line[1] * depth
            # HAZARD: a draft that sat idle first catches up on what it missed. Its time is only an upper bound.
            if was_idle and seconds > estimate:
                return
            seconds = min(seconds, 4.0 * estimate)
        self._fits.setdefault(batch.bit_length(), _Fit()).add(depth, seconds)

    def line(self, batch: int) -> tuple[float, float] | None:
        """c0, c1; None until something was measured. A scale never seen borrows from the nearest."""
        if not self._fits:
            return None
        scale = batch.bit_length()
        return self._fits[min(self._fits, key=lambda seen: (abs(seen - scale), seen))].line()
