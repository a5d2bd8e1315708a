"""How fast a worker sends its weights, by the effect on the requests that it serves."""

from dataclasses import dataclass

FIRST_RATE = 8e9
"""Bytes per second at first, while the worker serves requests and the effect is not known."""
MIN_RATE = 50e6
"""Bytes per second below which the rate never falls: a load must end."""
MAX_SLOWDOWN = 1.1
"""Time of a step while sending, relative to one without, above which the rate falls."""
FASTER, SLOWER = 1.5, 0.6
QUIET_STEPS, SENDING_STEPS = 8, 24
"""Steps of the two kinds of periods that alternate while the worker serves requests."""
PERIOD_SECONDS = 1.0
"""Longest period. A period that lasts so long has too few steps to compare."""
POLL_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Activity:
    """What a worker does in addition to sending."""

    is_busy: bool = False
    """Whether it serves requests."""
    steps: int = 0
    """Steps since its start, or rounds of a draft worker."""


@dataclass(slots=True)
class _Period:
    started: float
    steps: int
    is_quiet: bool
    num_bytes: int = 0


class SendRate:
    """Rate at which a worker sends its weights to all clients together. A worker without requests sends as fast as it can,
    within the limit. Otherwise periods without and with sending alternate, and their times per step are compared."""

    def __init__(self, bytes_per_second: float) -> None:
        """`bytes_per_second` is the limit. 0 means no limit."""
        self._limit = bytes_per_second or float("inf")
        self.rate = min(FIRST_RATE, self._limit)
        """Bytes per second while the worker serves requests."""
        self._next = 0.0
        self._period: _Period | None = None
        self._quiet: float | None = None
        """Seconds per step without sending, of the last quiet period."""

    def wait(self, now: float, activity: Activity) -> float:
        """Seconds until the next chunk may be sent, or until the next call."""
        self._observe(now, activity)
        if self._period is not None and self._period.is_quiet:
            return POLL_SECONDS
        return max(0.0, self._next - now)

    def add(self, num_bytes: int, began: float, activity: Activity) -> None:
        """A chunk was sent, from `began` on."""
        if self._period is not None:
            self._period.num_bytes += num_bytes
        self._next = max(self._next, began) + num_bytes / (self.rate if activity.is_busy else self._limit)

    def _observe(self, now: float, activity: Activity) -> None:
        if not activity.is_busy:
            self._period = self._quiet = None
            return
        period = self._period
        if period is None:
            self._period = _Period(now, activity.steps, is_quiet=True)
            return
        steps, seconds = activity.steps - period.steps, now - period.started
        needed = QUIET_STEPS if period.is_quiet else SENDING_STEPS
        if steps < needed and seconds < PERIOD_SECONDS:
            return
        each = seconds / steps if steps >= needed else None
        if period.is_quiet:
            self._quiet = each
        elif each is not None and self._quiet is not None and period.num_bytes:
            self._adjust(each / self._quiet, period.num_bytes / seconds)
        self._period = _Period(now, activity.steps, not period.is_quiet)
        self._next = max(self._next, now)

    def _adjust(self, slowdown: float, sent: float) -> None:
        """`sent` is the number of bytes per second that were sent. A rate far above it would only show that something else is
        the limit."""
        if slowdown > MAX_SLOWDOWN:
            self.rate = max(MIN_RATE, SLOWER * min(self.rate, sent))
        elif sent > self.rate / 2:
            self.rate *= FASTER
        self.rate = min(self.rate, self._limit)
