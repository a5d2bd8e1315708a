"""How much of something there was per second, lately."""

import threading
from collections import deque

WINDOW = 10.0
"""Seconds."""


class RecentRate:
    """Sums by whole second. Safe from any thread; time comes from the caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: deque[tuple[float, int]] = deque()

    def add(self, amount: int, now: float) -> None:
        second = float(int(now))
        with self._lock:
            if self._slots and self._slots[-1][0] == second:
                amount += self._slots.pop()[1]
            self._slots.append((second, amount))
            self._forget(now)

    def per_second(self, now: float) -> float:
        with self._lock:
            self._forget(now)
            return sum(amount for _, amount in self._slots) / WINDOW

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= now - WINDOW:
            self._slots.popleft()
