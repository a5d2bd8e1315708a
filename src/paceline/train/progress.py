"""Where a training says how far it is."""

import sys
from typing import Protocol, TextIO

from paceline.core.clock import Clock


class Progress(Protocol):
    def begin(self, stage: str) -> None:
        """Another stage, from nothing done."""
        ...

    def show(self, done: float, words: str) -> None:
        """`done` of the stage, 0 to 1, and what there is to say."""
        ...

    def note(self, words: str) -> None:
        """A line that stays."""
        ...


class PlainProgress:
    """Lines on a stream, at most one every few seconds: for terminals without Rich, and for logs."""

    def __init__(self, clock: Clock, stream: TextIO | None = None, seconds: float = 5.0) -> None:
        self._clock, self._stream, self._seconds = clock, stream or sys.stderr, seconds
        self._started, self._stage, self._shown = clock.now(), "", -seconds

    def begin(self, stage: str) -> None:
        self._stage, self._shown = stage, -self._seconds

    def show(self, done: float, words: str) -> None:
        now = self._clock.now() - self._started
        if now - self._shown >= self._seconds or done >= 1:
            self._shown = now
            self._print(f"{self._stage} {done:4.0%}  {words}")

    def note(self, words: str) -> None:
        self._print(words)

    def _print(self, line: str) -> None:
        print(f"[{self._clock.now() - self._started:6.1f} s] {line}", file=self._stream, flush=True)
