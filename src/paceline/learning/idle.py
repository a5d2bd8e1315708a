"""Leaves the machine to the server: lowest priority, few threads, and pauses between steps."""

import os
from collections.abc import Callable

from paceline.core.clock import Clock

NICENESS = 19


def lower_priority(threads: int) -> None:
    """The lowest priority for this process, and `threads` threads of torch."""
    import torch

    os.nice(max(0, NICENESS - os.nice(0)))
    torch.set_num_threads(threads)


class Pacer:
    """Called after every step, it pauses so that steps take at most `share` of the time."""

    def __init__(self, share: float, clock: Clock, pause: Callable[[float], None]) -> None:
        self._share, self._clock, self._pause = share, clock, pause
        self._last = clock.now()

    def start(self) -> None:
        self._last = self._clock.now()

    def __call__(self) -> None:
        busy = self._clock.now() - self._last
        if self._share < 1.0 and busy > 0:
            self._pause(busy * (1.0 / self._share - 1.0))
        self._last = self._clock.now()
