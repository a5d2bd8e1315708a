"""Sizes that passes over spans of any lengths are padded to, so that few graphs hold them all."""

from dataclasses import dataclass

from paceline.kernels.gpu.attention_plan import power_of_two, search_width
from paceline.kernels.gpu.linear import MAX_ROWS
from paceline.models.cuda_graph import MAX_GRAPH_ROWS

MAX_RAGGED_ROWS = 2048
MAX_RAGGED_SEQUENCES = 256
_MOST_WORK = 8 * 10**12
"""Bytes of weights times rows, beyond which launches hide behind the work (512 rows of 8 billion weights in bf16)."""


@dataclass(frozen=True, slots=True)
class RaggedSize:
    """What a pass is padded to. Padding is rows of no sequence: nothing of it is attended to or stored."""

    sequences: int
    rows: int


def ragged_size(sequences: int, rows: int) -> RaggedSize:
    """At most an eighth of it is padding where there are many rows."""
    step = max(64, power_of_two(rows) // 16)
    return RaggedSize(search_width(sequences), max(2 * MAX_ROWS, -(-rows // step) * step))


def most_ragged_rows(weight_bytes: int) -> int:
    """Of a pass that is worth recording, for a model of this size."""
    return min(MAX_RAGGED_ROWS, _MOST_WORK // weight_bytes)


def ragged_sizes(max_num_seqs: int, max_rows: int) -> list[RaggedSize]:
    """Of all passes over so many sequences and rows, the largest first; of one sequence those alone that fit no rectangle."""
    counts = {search_width(count) for count in range(1, min(max_num_seqs, MAX_RAGGED_SEQUENCES) + 1)}
    totals = {ragged_size(1, rows).rows for rows in range(1, max_rows + 1)}
    return [
        RaggedSize(count, rows)
        for rows in sorted(totals, reverse=True)
        for count in sorted(counts, reverse=True)
        if count > 1 or rows > MAX_GRAPH_ROWS
    ]
