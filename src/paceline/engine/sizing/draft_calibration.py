"""Measures what a draft model costs in graph steps, before the first request.

Without these times the depth policy would have to draft at a loss to learn them. Under load such probes are rare, and a server
whose first traffic is heavy would decode plainly for minutes.
"""

from dataclasses import dataclass

from paceline.core.clock import Clock
from paceline.engine.sizing.calibration import median_seconds
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.depth.costs.draft_time import LinearCost

CONTEXT = 256
"""Tokens of context of a measured sequence, less if the cache is small."""
PREFILL_ROWS = 2048
"""Most rows of the measured draft prefill: as many as one graph computes."""
SIZES = (1, 8, 32, 64, 256)
"""Numbers of sequences that are measured; a batch of another size costs about as much as the nearest."""


@dataclass(frozen=True, slots=True)
class MeasuredDraftCosts:
    """Measured costs of one draft model."""

    lines: dict[int, LinearCost]
    """Time of drafts by number of sequences."""
    prefill_seconds: float
    """Time of draft prefill per token, of several prompts at once."""


def measure_drafts(runner: ModelRunner, max_num_seqs: int, clock: Clock) -> MeasuredDraftCosts:
    """Costs for batches of up to `max_num_seqs` sequences. The first pass of a round computes two tokens of every sequence,
    each later pass one. The passes overwrite the cache."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in SIZES}, reverse=True):
        two, one_token = (median_seconds(runner, _spans(runner, count, rows), clock) for rows in (2, 1))
        lines[count] = LinearCost(max(0.0, two - one_token), one_token)
    rows = min(CONTEXT, runner.model.config.max_position, (runner.num_blocks - 1) * BLOCK_SIZE)
    num_blocks = -(-rows // BLOCK_SIZE)
    count = max(1, min(PREFILL_ROWS // rows, (runner.num_blocks - 1) // num_blocks))
    prompts = [Span(range(1 + i * num_blocks, 1 + (i + 1) * num_blocks), 0, [0] * rows, 1) for i in range(count)]
    return MeasuredDraftCosts(lines, median_seconds(runner, prompts, clock) / (count * rows))


def _spans(runner: ModelRunner, count: int, rows: int) -> list[Span]:
    """`count` sequences that share no blocks, so that their contexts are read from memory; new rows go to block 0."""
    num_blocks = min(CONTEXT // BLOCK_SIZE, (runner.num_blocks - 1) // count)
    context = num_blocks * BLOCK_SIZE
    firsts = range(1, 1 + count * num_blocks, num_blocks) if num_blocks else [1] * count
    return [Span([*range(first, first + num_blocks), 0], context, [0] * rows, num_logits=1) for first in firsts]
