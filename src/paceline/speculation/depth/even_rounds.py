"""Rounds that are as large for all as for the largest of them, and padded, as those that run ahead of the host on a GPU:
a row that one sequence does not use costs as much as one that it does. So all draft as deep as the deepest, as far as they may.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.speculation.depth.allocation import WORTHLESS, Allocation, Value
from paceline.speculation.depth.policy import Candidate, method_of
from paceline.speculation.depth.step_time import Costs


@dataclass(frozen=True, slots=True)
class EvenRounds:
    methods: frozenset[str]
    """Whose drafts are made in them."""
    seats: Callable[[int], int]
    """Of a round for so many sequences."""
    nodes: Callable[[int], int]
    """Drafted for each seat, where the most that somebody wants is so many."""

    def holds(self, batch: Sequence[Candidate]) -> bool:
        """Whether such a batch would decode in them: nobody in it wants drafts of another method."""
        return {method_of(category) for category in {c.category for c in batch if c.max_depth}} <= self.methods


def allocate_evenly(
    batch: Sequence[Candidate], values: Mapping[str, Value], costs: Costs, rounds: EvenRounds
) -> Allocation | None:
    """As `allocate`."""
    caps = Counter([(candidate.category, candidate.max_depth) for candidate in batch if candidate.category in values])
    most = max((cap for _, cap in caps), default=0)
    seats, best, best_rate = rounds.seats(len(batch)), 0, 0.0
    tokens, seconds, reached = float(len(batch)), 0.0, 0
    for nodes in sorted({rounds.nodes(depth) for depth in range(1, most + 1)}):
        gained = 0.0
        for position in range(reached, nodes):
            gained += _gained(position, caps, values)
        reached, tokens = nodes, tokens + gained
        if gained == 0.0:
            break
        drafting = sum([costs.lines[method].seconds(nodes) for method in {method_of(category) for category, _ in caps}])
        seconds = costs.verify(seats * (1 + nodes)) + costs.network + drafting
        if tokens / seconds > best_rate:
            best, best_rate = nodes, tokens / seconds
    if best == 0:
        return None
    depths = [min(candidate.max_depth, best) if candidate.category in values else 0 for candidate in batch]
    return Allocation(depths, best_rate)


def _gained(position: int, caps: Mapping[tuple[str, int], int], values: Mapping[str, Value]) -> float:
    """Tokens expected of the drafts at one position."""
    gained = 0.0
    for (category, cap), count in caps.items():
        value = values[category]
        if cap > position < len(value.survival) and value.survival[position] >= WORTHLESS:
            gained += count * value.delivery * value.survival[position]
    return gained
