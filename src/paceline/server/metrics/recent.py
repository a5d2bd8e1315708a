"""Rates and percentiles over a recent time window. The classes are thread-safe. The caller passes the time."""

import math
import threading
from collections import deque
from collections.abc import Sequence

RATE_WINDOW = 10.0
"""Seconds."""
VALUES_WINDOW = 60.0
"""Seconds."""
MAX_VALUES = 4096
"""Values kept; under heavy traffic they cover less than the window."""


class RecentRate:
    """Mean rate per second over a window, from sums of whole seconds."""

    def __init__(self, window: float = RATE_WINDOW) -> None:
        self._window = window
        self._lock = threading.Lock()
        self._sums: deque[tuple[float, int]] = deque()

    def add(self, amount: int, now: float) -> None:
        second = float(int(now))
        with self._lock:
            if self._sums and self._sums[-1][0] == second:
                amount += self._sums.pop()[1]
            self._sums.append((second, amount))
            self._drop_old(now)

    def per_second(self, now: float) -> float:
        with self._lock:
            self._drop_old(now)
            return sum(amount for _, amount in self._sums) / self._window

    def _drop_old(self, now: float) -> None:
        while self._sums and self._sums[0][0] <= now - self._window:
            self._sums.popleft()


class RecentValues:
    """Percentiles of timed values."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float, now: float) -> None:
        with self._lock:
            self._values.append((now, value))

    def percentiles(self, shares: Sequence[float], now: float) -> tuple[float, ...] | None:
        """Nearest-rank percentiles, one for each share between 0 and 1; None without values."""
        with self._lock:
            while self._values and self._values[0][0] <= now - VALUES_WINDOW:
                self._values.popleft()
            values = sorted(value for _, value in self._values)
        if not values:
            return None
        return tuple(values[max(0, math.ceil(share * len(values)) - 1)] for share in shares)
