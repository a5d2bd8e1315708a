"""Progress reports, and stopping a training with Ctrl-C."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, TextIO

from paceline.core.clock import Clock


class TrainingLog(Protocol):
    """Receives progress reports."""

    def begin(self, stage: str) -> None:
        """Start a stage."""
        ...

    def show(self, done: float, message: str) -> None:
        """Report the share of the stage that is done, 0 to 1, and a message."""
        ...

    def note(self, message: str) -> None:
        """Print a permanent line."""
        ...


class PlainProgress:
    """Progress as lines on a stream, at most one every few seconds."""

    def __init__(self, clock: Clock, stream: TextIO | None = None, seconds: float = 5.0) -> None:
        self._clock, self._stream, self._seconds = clock, stream or sys.stderr, seconds
        self._started, self._stage, self._shown, self._is_complete = clock.now(), "", -seconds, False

    def begin(self, stage: str) -> None:
        self._stage, self._shown, self._is_complete = stage, -self._seconds, False

    def show(self, done: float, message: str) -> None:
        now = self._clock.now() - self._started
        if now - self._shown >= self._seconds or (done >= 1 and not self._is_complete):
            self._shown, self._is_complete = now, done >= 1
            self._print(f"{self._stage} {done:4.0%}  {message}")

    def note(self, message: str) -> None:
        self._print(message)

    def _print(self, line: str) -> None:
        print(f"[{self._clock.now() - self._started:6.1f} s] {line}", file=self._stream, flush=True)


INTERRUPTED = 130
"""Exit status of an interrupted training."""


class Stopped(Exception):
    """Raised to leave a stage that cannot be resumed from its middle."""


class StopRequest:
    """Whether to stop. Inside `interruptible` a request raises `Stopped` at once: work whose result may be dropped."""

    def __init__(self) -> None:
        self._is_requested = self._is_interruptible = False

    def __call__(self) -> bool:
        return self._is_requested

    def request(self) -> None:
        """Request the stop. A signal handler may call it."""
        self._is_requested = True
        if self._is_interruptible:
            self._is_interruptible = False
            raise Stopped

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        if self():
            raise Stopped
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False


@contextmanager
def stop_on_interrupt(notify: Callable[[str], None]) -> Iterator[StopRequest]:
    """Yield the request that the first SIGINT or SIGTERM makes. A second signal acts as usual."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}
    stop = StopRequest()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        notify("stopping; the same command resumes the training")
        stop.request()

    for number in signals:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
