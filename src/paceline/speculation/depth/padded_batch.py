"""The two shapes of a target pass, and the best drafts for each.

A ragged batch has a row for each scheduled token. A padded batch, which passes on a GPU use, has as many rows for every slot as
for the sequence with the most drafts: an unused row costs as much as a used one. In a padded batch every sequence therefore
drafts as deep as the deepest, within its own limit.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.traffic import TrafficClass
from paceline.speculation.depth.allocation import MIN_SURVIVAL, Allocation, Value, allocate
from paceline.speculation.depth.costs.step_time import Costs
from paceline.speculation.depth.policy import DepthCandidate

FLAT_SHARE = 0.03
"""Share of the best expected tokens per second that a padded batch of several sequences gives up for shallower drafts. The rate
is nearly flat around the best depth, and the sequences with the fewest accepted drafts lose by deeper ones: every step takes
longer, and a batch ends with them."""


class BatchShape(Protocol):
    @property
    def is_padded(self) -> bool: ...

    def slots(self, batch: int, /) -> int:
        """Sequences that a pass over `batch` sequences has rows for."""
        ...

    def rows(self, batch: int, num_drafting: int, depth: int) -> int:
        """Rows of a pass over `batch` sequences, of which `num_drafting` have `depth` drafts each."""
        ...

    def allocate(
        self, batch: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value], costs: Costs
    ) -> Allocation | None:
        """The best drafts; None if no candidate may draft. The method of every traffic class in `values` has known costs."""
        ...


class RaggedBatch:
    is_padded = False

    def slots(self, batch: int, /) -> int:
        return batch

    def rows(self, batch: int, num_drafting: int, depth: int) -> int:
        return batch + num_drafting * depth

    def allocate(
        self, batch: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value], costs: Costs
    ) -> Allocation | None:
        return allocate(batch, values, costs)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    methods: frozenset[str]
    """Methods whose drafts are verified in passes of this shape."""
    slots: Callable[[int], int]
    nodes: Callable[[int], int]
    """Draft tokens per slot if the deepest request of the batch asks for that depth."""
    max_draft_tokens: int = 1 << 30
    """Draft tokens of all slots together in one step."""

    @property
    def is_padded(self) -> bool:
        return True

    def rows(self, batch: int, num_drafting: int, depth: int) -> int:
        return self.slots(batch) * (1 + self.nodes(depth))

    def covers(self, batch: Sequence[DepthCandidate]) -> bool:
        """Whether the batch decodes in passes of this shape: no candidate drafts by another method."""
        return {traffic.method for traffic in {c.traffic for c in batch if c.max_depth}} <= self.methods

    def allocate(
        self, batch: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value], costs: Costs
    ) -> Allocation | None:
        caps = Counter([(c.traffic, c.max_depth) for c in batch if c.traffic in values])
        most = max((cap for _, cap in caps), default=0)
        lines = [costs.lines[method] for method in {traffic.method for traffic, _ in caps}]
        tokens, reached, rates = float(len(batch)), 0, dict[int, float]()
        for nodes in sorted({self.nodes(depth) for depth in range(1, most + 1)}):
            if nodes * self.slots(len(batch)) > self.max_draft_tokens:
                break
            gained = sum([_gained(position, caps, values) for position in range(reached, nodes)])
            if gained == 0.0:
                break
            reached, tokens = nodes, tokens + gained
            prompt_rows = costs.prompt_rows * tokens
            rows = self.rows(len(batch), len(batch), nodes) + prompt_rows
            seconds = costs.verify(rows) + costs.fixed + costs.prompt_seconds * prompt_rows
            rates[nodes] = tokens / (seconds + sum([line.seconds(nodes) for line in lines]))
        if not rates:
            return None
        needed = max(rates.values()) * (1.0 - FLAT_SHARE if len(batch) > 1 else 1.0)
        best = next(nodes for nodes, rate in rates.items() if rate >= needed)
        return Allocation([min(c.max_depth, best) if c.traffic in values else 0 for c in batch], rates[best])


def _gained(position: int, caps: Mapping[tuple[TrafficClass, int], int], values: Mapping[TrafficClass, Value]) -> float:
    """Expected tokens of the drafts at one position."""
    gained = 0.0
    for (traffic, cap), count in caps.items():
        value = values[traffic]
        if cap > position < len(value.survival) and value.survival[position] >= MIN_SURVIVAL:
            gained += count * value.delivery * value.survival[position]
    return gained
