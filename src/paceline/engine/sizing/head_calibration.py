"""Measures what an EAGLE head costs in host steps, before the first request.

The first draft of a process is slow. As the only known cost it would keep the depth policy from drafting for a long time.
"""

from collections.abc import Sequence

from torch import Tensor

from paceline.core.clock import Clock
from paceline.core.sampling import SamplingParams
from paceline.models.drafts.eagle import EagleModel
from paceline.speculation.depth.draft_time import LinearCost
from paceline.speculation.proposer import Hidden, Progress, Proposer

SIZES = (1, 8)
"""Numbers of sequences that are measured; a batch of another size costs about as much as the nearest."""
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
        batch = [self._progress(one, depth, Hidden(start, states, None)) for one in self._ids]
        began = clock.now()
        self._proposer.observe(batch)
        self._proposer.collect(self._ids, began)
        return clock.now() - began

    def close(self) -> None:
        self._proposer.close(self._ids)

    def _states(self, rows: int) -> dict[int, Tensor]:
        config = self._head.config
        return dict.fromkeys(config.state_layers, self._head.hidden_norm.new_zeros(rows, config.hidden_size))

    def _progress(self, sequence_id: int, depth: int, hidden: Hidden) -> Progress:
        return Progress(
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
