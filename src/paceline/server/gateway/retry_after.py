"""When a rejected client may try again: the Retry-After header."""

import math
from collections import deque

MAX_RETRY_AFTER = 60
"""Seconds; largest value of the header."""
NUM_FINISH_TIMES = 64
"""Finish times that give the rate."""


class RetryAfter:
    """The time until the queue is empty, at the recent rate of finished choices. The caller passes the time, in seconds."""

    def __init__(self) -> None:
        self._finish_times: deque[float] = deque(maxlen=NUM_FINISH_TIMES)

    def add_finish(self, now: float) -> None:
        """A choice has finished."""
        self._finish_times.append(now)

    def clear(self) -> None:
        """The server is idle: that says nothing about the rate of the next burst."""
        self._finish_times.clear()

    def seconds(self, num_waiting: int) -> int:
        """Value of the header while `num_waiting` choices wait."""
        times = self._finish_times
        if len(times) < 2:
            return 1
        per_choice = (times[-1] - times[0]) / (len(times) - 1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(per_choice * num_waiting)))
