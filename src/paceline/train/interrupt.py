"""Ctrl-C as a wish: a training ends its step, saves, and can go on later."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
"""Exit status of a training that is not at its end."""


class Stopped(Exception):
    """The user wants to stop, and what was under way cannot go on from its middle."""


@contextmanager
def stop_on_interrupt(said: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Yields what says whether to stop. The first SIGINT or SIGTERM is a wish, a second one works as it always does."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in signals}
    heard: list[int] = []

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def hear(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        restore()
        said("stopping after this step; the same command goes on from there")

    for number in signals:
        signal.signal(number, hear)
    try:
        yield lambda: bool(heard)
    finally:
        restore()
