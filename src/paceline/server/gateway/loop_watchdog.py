"""Measures how late the event loop runs its callbacks, and logs where it is stuck."""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

logger = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two measurements."""
STUCK_SECONDS = 1.0
"""Lag from which the stack of the event loop is logged."""


class LoopWatchdog:
    """A callback of the loop measures its own delay. A thread notices a loop that runs no callback at all."""

    def __init__(self, record: Callable[[float], None]) -> None:
        """`record` receives every measured lag in seconds, on the event loop."""
        self._record = record
        self._due = 0.0
        """Time of the next measurement."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measures inside the block."""
        stop, self._due = threading.Event(), monotonic() + INTERVAL
        loop_thread = threading.get_ident()
        thread = threading.Thread(target=self._watch, args=(stop, loop_thread), name="paceline-watchdog", daemon=True)
        thread.start()
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()
            stop.set()

    async def _measure(self) -> None:
        while True:
            self._due = monotonic() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._record(max(0.0, monotonic() - self._due))

    def _watch(self, stop: threading.Event, loop_thread: int) -> None:
        is_reported, last = False, monotonic()
        while not stop.wait(STUCK_SECONDS / 2):
            now = monotonic()
            was_suspended, last = now - last > STUCK_SECONDS, now
            lag = now - self._due  # read once: the loop may go on meanwhile
            is_stuck = lag > STUCK_SECONDS and not was_suspended
            if is_stuck and not is_reported:
                frame = sys._current_frames().get(loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                logger.error("the event loop is stuck for %.1f s at:\n%s", lag, stack)
            is_reported = is_stuck
