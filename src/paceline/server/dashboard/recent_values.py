"""How long something took, lately."""

import math
import threading
from collections import deque
from collections.abc import Sequence

WINDOW = 60.0
"""Seconds."""
LIMIT = 4096
"""Values kept at the most; under more traffic the window is shorter."""


class RecentValues:
    """Values and when they were seen. Safe from any thread; time comes from the caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: deque[tuple[float, float]] = deque(maxlen=LIMIT)

    def add(self, value: float, now: float) -> None:
        with self._lock:
            self._values.append((now, value))

    def percentiles(self, shares: Sequence[float], now: float) -> tuple[float, ...] | None:
        """By nearest rank: the smallest value that is at least as large as this share of them. None when there are none."""
        with self._lock:
            while self._values and self._values[0][0] <= now - WINDOW:
                self._values.popleft()
            values = sorted(value for _, value in self._values)
        if not values:
            return None
        return tuple(values[max(0, math.ceil(share * len(values)) - 1)] for share in shares)
