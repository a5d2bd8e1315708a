"""Measures what an EAGLE head costs, in host steps and in graph steps, before the first request.

The first draft of a process is slow. As the only known cost it would keep the depth policy from drafting for a long time.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import linear_regression, median

from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams
from paceline.engine.sizing.draft_calibration import SIZES as GRAPH_SIZES
from paceline.engine.sizing.draft_calibration import MeasuredDraftCosts
from paceline.kernels.layout import BLOCK_SIZE
from paceline.models.cuda_graph import StreamTimer
from paceline.models.drafts.eagle import EagleModel, EagleRunner
from paceline.models.runner import Span
from paceline.speculation.depth.costs.draft_time import LinearCost
from paceline.speculation.proposer import HiddenRows, Proposer, SequenceProgress

SIZES = (1, 8)
"""Numbers of sequences that are measured in host steps; a batch of another size costs about as much as the nearest."""
PREFILL_ROWS, PREFILL_SEQUENCES = 256, 8
"""Rows of each sequence of the measured draft prefill, and their number."""
REPEATS = 3
_PROMPT = 16
"""Tokens of a measured sequence."""
_COMMITTED = 2
"""Tokens that a measured round has committed."""


class _Rounds:
    """Rounds of a batch of sequences whose tokens and hidden states are zeros."""

    def __init__(self, proposer: Proposer, head: EagleModel, count: int) -> None:
        self._proposer, self._head = proposer, head
        self._ids = [-1 - i for i in range(count)]  # no sequence of a request
        self._tokens: list[int] = []

    def next(self, depth: int, num_committed: int, clock: Clock) -> float:
        """Seconds in which every sequence gets a draft, after `num_committed` more tokens."""
        start = max(0, len(self._tokens) - 1)
        self._tokens += [0] * num_committed
        states = self._states(len(self._tokens) - 1 - start)
        batch = [self._progress(sequence_id, depth, HiddenRows(start, states, None)) for sequence_id in self._ids]
        began = clock.now()
        self._proposer.observe(batch)
        self._proposer.collect(self._ids, began)
        return clock.now() - began

    def close(self) -> None:
        self._proposer.close(self._ids)

    def _states(self, rows: int) -> dict[int, Tensor]:
        config = self._head.config
        return dict.fromkeys(config.state_layers, self._head.hidden_norm.new_zeros(rows, config.hidden_size))

    def _progress(self, sequence_id: int, depth: int, hidden: HiddenRows) -> SequenceProgress:
        return SequenceProgress(
            sequence_id,
            self._tokens,
            depth,
            SamplingParams(temperature=0.0),
            seed=0,
            choice=0,
            num_prompt=_PROMPT,
            verification="coupled",
            cache_salt="calibration",
            hidden=hidden,
        )


def measure_head(
    proposer: Proposer, head: EagleModel, max_num_seqs: int, max_depth: int, clock: Clock
) -> dict[int, LinearCost]:
    """The time of drafts of `head` by number of sequences, from rounds with one node and with `max_depth` nodes, the fastest
    of each."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in SIZES}):
        rounds = _Rounds(proposer, head, count)
        rounds.next(max_depth, _PROMPT, clock)  # a draft prefill, and what the first draft loads
        depths: Sequence[int] = (1, max(2, max_depth))
        first, deepest = (min(rounds.next(depth, _COMMITTED, clock) for _ in range(REPEATS)) for depth in depths)
        rounds.close()
        per_depth = max(0.0, deepest - first) / (depths[1] - 1)
        lines[count] = LinearCost(max(0.0, first - per_depth), per_depth)
    return lines


def measure_head_in_graphs(
    draft_seconds: Callable[[int], Mapping[int, float]], runner: EagleRunner, max_num_seqs: int
) -> MeasuredDraftCosts:
    """Costs in graph steps. `draft_seconds(size)`: seconds of drafting by number of nodes, for about `size` sequences."""
    lines = {}
    for count in sorted({min(size, max_num_seqs) for size in GRAPH_SIZES}):
        times = draft_seconds(count)
        if len(times) > 1:
            slope, base = linear_regression(list(times), list(times.values()))
            lines[count] = LinearCost(max(0.0, base), max(0.0, slope))
        elif times:
            (seconds,) = times.values()
            lines[count] = LinearCost(seconds, 0.0)
    return MeasuredDraftCosts(lines, median(_prefill_seconds(runner) for _ in range(REPEATS)))


def _prefill_seconds(runner: EagleRunner) -> float:
    """Seconds per token of a draft prefill of several sequences, which write to a lane."""
    rows = min(PREFILL_ROWS, len(runner.model.cos))
    span = Span(runner.lane(0)[:1] * -(-rows // BLOCK_SIZE), 0, [0] * rows, 0)
    shape = PREFILL_SEQUENCES * rows, runner.model.config.hidden_size
    states = dict.fromkeys(runner.model.config.state_layers, runner.model.hidden_norm.new_zeros(shape))
    timer = StreamTimer(runner.model.device)
    runner.forward([span] * PREFILL_SEQUENCES, states)
    return timer.seconds() / shape[0]
