"""Durations of the phases of a start: one log line for each."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Phase:
    name: str
    note: str = ""
    """What the phase did, for the end of its log line."""


@contextmanager
def phase(name: str) -> Iterator[Phase]:
    """Log how long the context took, unless it raised."""
    running = Phase(name)
    began = time.perf_counter()
    yield running
    log_phase(running.name, time.perf_counter() - began, running.note)


def log_phase(name: str, seconds: float, note: str = "") -> None:
    logger.info("start: %s took %.1f s%s", name, seconds, f" ({note})" if note else "")
