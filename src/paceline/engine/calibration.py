"""How long passes of the target take on this machine, measured before the first request."""

from statistics import median

from paceline.core.clock import Clock
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner, Span

MAX_SECONDS = 2.0
REPEATS = 3


def measure_passes(runner: ModelRunner, max_rows: int, clock: Clock) -> dict[int, float]:
    """{rows: seconds} for a few row counts up to `max_rows`, one row a sequence, the cache still empty.

    Every span lies in block 0: what is written there is overwritten before anybody reads it.
    """
    passes: dict[int, float] = {}
    spent, rows = 0.0, 1
    while rows <= max_rows and spent < MAX_SECONDS:
        spans = [Span(blocks=[0], context_len=i % BLOCK_SIZE, tokens=[0], num_logits=1) for i in range(rows)]
        seconds = [runner.seconds(spans, clock) for _ in range(REPEATS + 1)]  # the first warms up
        passes[rows] = median(seconds[1:])
        spent += sum(seconds[1:])  # what the first one compiles is not the device's speed
        rows *= 2
    return passes
