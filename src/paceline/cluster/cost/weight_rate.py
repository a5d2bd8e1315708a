"""How fast a worker gives its weights away, so that serving does not suffer. Pure: times in, seconds to wait out."""

BUSY_SHARE = 0.25
"""Of the limit, while the worker has requests to serve."""


class Pace:
    """All takers together get `bytes_per_second`; 0: no limit but `BUSY_SHARE` of the time while it serves."""

    def __init__(self, bytes_per_second: float) -> None:
        self._limit = bytes_per_second
        self._free = 0.0

    def wait(self, now: float) -> float:
        """Seconds until the next chunk may go."""
        return max(0.0, self._free - now)

    def gave(self, num_bytes: int, began: float, now: float, is_busy: bool) -> None:
        """A chunk went; making it ready took from `began` until `now`."""
        share = BUSY_SHARE if is_busy else 1.0
        seconds = num_bytes / (self._limit * share) if self._limit else (now - began) / share
        self._free = max(self._free, began) + seconds
