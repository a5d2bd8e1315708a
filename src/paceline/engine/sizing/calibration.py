"""Measures the time of target passes on this machine, before the first request."""

from collections.abc import Sequence
from statistics import median

from paceline.core.clock import Clock
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner, Span

MAX_SECONDS = 2.0
"""Time after which no larger pass is measured."""
REPEATS = 3
_FIRST_CONTEXT, _LONGER = 256, 4
"""Tokens of the first measured context, and the factor to the next."""
_MIN_RATIO = 1.5
"""Ratio of a pass with context to one without from which the cost of context is measurable."""


def measure_passes(runner: ModelRunner, max_num_seqs: int, max_rows: int, clock: Clock) -> dict[int, float]:
    """{rows: seconds} for a few row counts up to `max_rows`, with an empty cache. Up to `max_num_seqs` rows there is one row
    per sequence, then several, as in verification.

    Every span lies in block 0: its content is overwritten before any sequence reads it.
    """
    passes: dict[int, float] = {}
    spent, rows = 0.0, 1
    while rows <= max_rows and spent < MAX_SECONDS:
        each = -(-rows // max_num_seqs)
        places = BLOCK_SIZE + 1 - each
        spans = [Span([0], i % places, [0] * each, num_logits=each) for i in range(rows // each)]
        seconds = passes[len(spans) * each] = median_seconds(runner, spans, clock)
        spent += REPEATS * seconds
        rows *= 2
    return passes


def measure_context(runner: ModelRunner, max_num_seqs: int, clock: Clock, max_tokens: int | None = None) -> float:
    """Seconds that a token of context adds to a pass; 0 for a model with a sliding window in all layers. Measured with as many
    sequences as possible: few long contexts leave part of a GPU idle. `max_tokens` limits all contexts together, for a cache
    that takes memory only where it is written."""
    count = min(max_num_seqs, max(1, runner.num_blocks * BLOCK_SIZE // _FIRST_CONTEXT), runner.num_blocks - 1)
    config = runner.model.config
    if count < 1 or (config.sliding_window is not None and not config.full_layers):
        return 0.0
    blocks_each = (runner.num_blocks - 1) // count
    most = min(blocks_each * BLOCK_SIZE, (runner.model.config.max_position - 1) // BLOCK_SIZE * BLOCK_SIZE)

    def seconds(each: int) -> float:
        """The new row goes to block 0. Sequences share no blocks: shared ones would stay in the processor's cache."""
        firsts = range(1, 1 + count * blocks_each, blocks_each)
        tables = [[*range(first, first + each // BLOCK_SIZE), 0] for first in firsts]
        return median_seconds(runner, [Span(table, each, [0], num_logits=1) for table in tables], clock)

    if max_tokens is not None:
        blocks_each = min(blocks_each, max(1, max_tokens // count // BLOCK_SIZE))
        most = min(most, blocks_each * BLOCK_SIZE)
        for values in (values for layer in runner.cache for values in layer):
            values[: 1 + count * blocks_each] = 0.0  # reads of pages without memory would be too fast
    without = with_context = seconds(0)
    each, spent = min(_FIRST_CONTEXT, most), 0.0
    while each and spent < MAX_SECONDS:
        with_context = seconds(each)
        spent += REPEATS * with_context
        if with_context > _MIN_RATIO * without or each * _LONGER > most:
            break
        each *= _LONGER
    return max(0.0, with_context - without) / (count * each) if each else 0.0


def median_seconds(runner: ModelRunner, spans: Sequence[Span], clock: Clock) -> float:
    """Median time of such a pass, after a first one that compiles."""
    runner.measure_seconds(spans, clock)
    return median(runner.measure_seconds(spans, clock) for _ in range(REPEATS))
