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
    """`Rounds`."""

    methods: frozenset[str]
    """Whose drafts are made in them."""
    seats: Callable[[int], int]
    nodes: Callable[[int], int]
    """Drafted for each seat, where the most that somebody wants is so many."""

    @property
    def is_even(self) -> bool:
        return True

    def rows(self, batch: int, drafting: int, depth: int) -> int:
        return self.seats(batch) * (1 + self.nodes(depth))

    def holds(self, batch: Sequence[Candidate]) -> bool:
        """Whether such a batch would decode in them: nobody in it wants drafts of another method."""
        return {method_of(category) for category in {c.category for c in batch if c.max_depth}} <= self.methods

    def allocate(self, batch: Sequence[Candidate], values: Mapping[str, Value], costs: Costs) -> Allocation | None:
        caps = Counter([(c.category, c.max_depth) for c in batch if c.category in values])
        most = max((cap for _, cap in caps), default=0)
        lines = [costs.lines[method] for method in {method_of(category) for category, _ in caps}]
        tokens, reached, best, best_rate = float(len(batch)), 0, 0, 0.0
        for nodes in sorted({self.nodes(depth) for depth in range(1, most + 1)}):
            gained = sum([_gained(position, caps, values) for position in range(reached, nodes)])
            if gained == 0.0:
                break
            reached, tokens = nodes, tokens + gained
            seconds = costs.verify(self.rows(len(batch), len(batch), nodes)) + costs.network
            rate = tokens / (seconds + sum([line.seconds(nodes) for line in lines]))
            if rate > best_rate:
                best, best_rate = nodes, rate
        if best == 0:
            return None
        return Allocation([min(c.max_depth, best) if c.category in values else 0 for c in batch], best_rate)


def _gained(position: int, caps: Mapping[tuple[str, int], int], values: Mapping[str, Value]) -> float:
    """Tokens expected of the drafts at one position."""
    gained = 0.0
    for (category, cap), count in caps.items():
        value = values[category]
        if cap > position < len(value.survival) and value.survival[position] >= WORTHLESS:
            gained += count * value.delivery * value.survival[position]
    return gained
