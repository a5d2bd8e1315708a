"""How long passes of the target take on this machine, measured before the first request."""

from collections.abc import Sequence
from statistics import median

from paceline.core.clock import Clock
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner, Span

MAX_SECONDS = 2.0
REPEATS = 3
_FIRST_CONTEXT, _LONGER = 256, 4
_ENOUGH = 1.5
"""Times as long as without context a pass must be to tell what context takes."""


def measure_passes(runner: ModelRunner, max_num_seqs: int, max_rows: int, clock: Clock) -> dict[int, float]:
    """{rows: seconds} for a few row counts up to `max_rows`, the cache still empty: one row a sequence as long as there are
    enough, then more of each, as where drafts are verified.

    Every span lies in block 0: what is written there is overwritten before anybody reads it.
    """
    passes: dict[int, float] = {}
    spent, rows = 0.0, 1
    while rows <= max_rows and spent < MAX_SECONDS:
        each = -(-rows // max_num_seqs)
        places = BLOCK_SIZE + 1 - each
        spans = [Span([0], i % places, [0] * each, num_logits=each) for i in range(rows // each)]
        seconds = passes[len(spans) * each] = _seconds(runner, spans, clock)
        spent += REPEATS * seconds
        rows *= 2
    return passes


def measure_context(runner: ModelRunner, max_num_seqs: int, clock: Clock) -> float:
    """Seconds that a token of context adds to a pass; 0 for a model with a window, which does not read all of it. With as many
    sequences as there may be: that is where contexts weigh, and few long ones leave part of a device idle."""
    count = min(max_num_seqs, max(1, runner.num_blocks * BLOCK_SIZE // _FIRST_CONTEXT), runner.num_blocks - 1)
    if count < 1 or runner.model.config.sliding_window is not None:
        return 0.0
    blocks_each = (runner.num_blocks - 1) // count
    most = min(blocks_each * BLOCK_SIZE, (runner.model.config.max_position - 1) // BLOCK_SIZE * BLOCK_SIZE)

    def seconds(each: int) -> float:
        """A row goes to block 0. Nobody else's blocks are read: a few would stay in a processor's own cache."""
        firsts = range(1, 1 + count * blocks_each, blocks_each)
        tables = [[*range(first, first + each // BLOCK_SIZE), 0] for first in firsts]
        return _seconds(runner, [Span(table, each, [0], num_logits=1) for table in tables], clock)

    without = with_context = seconds(0)
    each, spent = min(_FIRST_CONTEXT, most), 0.0
    while each and spent < MAX_SECONDS:
        with_context = seconds(each)
        spent += REPEATS * with_context
        if with_context > _ENOUGH * without or each * _LONGER > most:
            break
        each *= _LONGER
    return max(0.0, with_context - without) / (count * each) if each else 0.0


def _seconds(runner: ModelRunner, spans: Sequence[Span], clock: Clock) -> float:
    """Of such a pass, once what the first one compiles is there."""
    runner.measure_seconds(spans, clock)
    return median(runner.measure_seconds(spans, clock) for _ in range(REPEATS))
