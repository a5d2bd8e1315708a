"""How many tokens to draft for each sequence of a batch, for the most expected tokens per second. It is a pure function.

The k-th node drafted for a sequence adds S_k expected tokens, the probability that it is accepted, and one row to the
target's pass. With B sequences, n nodes in all, and D_m the most that method m drafts for any of its sequences,

    rate = (B + sum of the n chosen S) / (t_verify(B + n) + t_context + t_network + t_host + sum_m (c0_m + c1_m D_m))

A proposer returns drafts for a share of the requests (`delivery`). Tokens and rows of a draft shrink by that share; the
cost of requesting it does not.

For given D_m the best n nodes are the n largest S among positions up to D_m. S never increases with k, so a sequence's
nodes enter in order. Equal S form a group, within which the rate can only peak where t_verify bends upwards: only group
ends and such bends are tried. The nodes of one traffic class come by position, so that one pass over them tries every D. With
several classes of one method every D up to `EVERY_DEPTH` is a pass, and some larger ones. Several methods take turns,
each trying fewer, until no method gains.

A target pass has one of two shapes. A ragged batch has a row for each scheduled token. A padded batch, which passes on a GPU
use, has as many rows for every slot as for the sequence with the most drafts: an unused row costs as much as a used one. In a
padded batch every sequence therefore drafts as deep as the deepest, within its own limit.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.core.traffic import TrafficClass
from paceline.policy.depth.observation import DepthCandidate
from paceline.policy.depth.step_cost import Costs

MIN_SURVIVAL = 0.01
"""Acceptance probability below which a draft is left out, even if its row seems to cost nothing."""
EVERY_DEPTH = 8
"""Depth up to which every depth is tried."""
SWEEPS = 2
"""Turns of each method."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Depths by candidate, and the expected tokens per second."""

    depths: list[int]
    rate: float


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a traffic class's drafts: S by position, and the probability that a request for drafts returns any."""

    survival: Sequence[float]
    delivery: float = 1.0


def allocate(batch: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value], costs: Costs) -> Allocation | None:
    """The best allocation with at least one draft; None if no candidate may draft. The method of every class in `values` has
    known costs."""
    groups = _groups(batch, values)
    if not groups:
        return None
    most: dict[str, int] = {}
    for group in groups:
        most[group.method] = max(group.position, most.get(group.method, 0))
    best = _search(groups, most, dict.fromkeys(most, 0), len(batch), costs)
    if len(most) > 1:  # the search from zero may stop at one method: search from the other side as well
        best = max(best, _search(groups, most, most, len(batch), costs), key=lambda plan: plan.rate)
    return Allocation(_spread(batch, groups, best), best.rate / costs.scale)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The `num_nodes` most valuable nodes among positions up to each method's limit. `rate` is for a scale of 1."""

    rate: float
    num_nodes: int
    limits: Mapping[str, int]


class _Group(NamedTuple):
    """One position of all sequences of a traffic class that may draft so deep."""

    survival: float
    position: int
    width: int
    traffic: TrafficClass
    method: str
    delivery: float


def _groups(batch: Sequence[DepthCandidate], values: Mapping[TrafficClass, Value]) -> list[_Group]:
    """All positions of all classes, most valuable first; among equals the shallower first."""
    groups = []
    caps = Counter([(candidate.traffic, candidate.max_depth) for candidate in batch])
    for traffic, value in values.items():
        own, method = [(cap, count) for (name, cap), count in caps.items() if name == traffic], traffic.method
        for position, survival in enumerate(value.survival, start=1):
            if survival < MIN_SURVIVAL:
                break
            width = sum([count for cap, count in own if cap >= position])
            if width == 0:
                break
            groups.append(_Group(survival, position, width, traffic, method, value.delivery))
    groups.sort(key=lambda group: (-group.survival, group.position))
    return groups


def _search(
    groups: Sequence[_Group], most: Mapping[str, int], start: Mapping[str, int], batch: int, costs: Costs
) -> _Plan:
    """The best limits found from `start` by changing one method at a time."""
    is_alone, is_single = len(most) == 1, all(group.traffic == groups[0].traffic for group in groups)
    best = _Plan(0.0, 0, start)
    for _ in range(SWEEPS):
        before = best.rate
        for method in most:
            below = 0 if is_alone else -1
            for deepest in [most[method]] if is_single else _depths_to_try(most[method], is_alone):
                plan = _fill(groups, {**best.limits, method: deepest}, method, below, batch, costs)
                best, below = plan if plan.rate > best.rate else best, deepest
        if is_alone or best.rate == before:
            break
    return best


def _depths_to_try(most: int, is_alone: bool) -> list[int]:
    """1, 2, ... 8, 10, 12, 15, 18, 22, ... and `most`; with several methods 0, 1, 3, 9, ... and `most`."""
    depths = [1] if is_alone else [0, 1]
    while depths[-1] < most:
        last = depths[-1]
        step = 2 * last if not is_alone else 1 if last < EVERY_DEPTH else last // 4
        depths.append(min(most, last + step))
    return depths


def _fill(
    groups: Sequence[_Group], limits: Mapping[str, int], method: str, below: int, batch: int, costs: Costs
) -> _Plan:
    """The best number of nodes within `limits` that takes `method` beyond `below`, since smaller limits were tried before."""
    seconds, bends, scale = costs.curve, costs.curve.bends, costs.scale
    best_rate, best_nodes = 0.0, 0
    num_nodes, rows, tokens, overhead = 0, float(batch), float(batch), (costs.context + costs.fixed) / scale
    reached = dict.fromkeys(limits, 0)
    is_new = below < 0
    for survival, position, width, _, own, delivery in groups:
        if position > limits[own]:
            continue
        if position > reached[own]:
            base, per_depth = costs.lines[own]
            overhead += (per_depth if reached[own] else base + per_depth) / scale  # positions come one by one
            reached[own] = position
            is_new = is_new or (own == method and position > below)
        drafts = width * delivery
        if is_new:
            first, last = bisect_right(bends, rows), bisect_left(bends, rows + drafts)
            for count in (*[int((bend - rows) / delivery) for bend in bends[first:last]], width):
                more = count * delivery
                rate = (tokens + more * survival) / (seconds(rows + more) + overhead)
                if rate > best_rate and count:
                    best_rate, best_nodes = rate, num_nodes + count
        num_nodes, rows, tokens = num_nodes + width, rows + drafts, tokens + drafts * survival
    return _Plan(best_rate, best_nodes, limits)


def _spread(batch: Sequence[DepthCandidate], groups: Sequence[_Group], plan: _Plan) -> list[int]:
    """Depths by candidate: nodes are given out in the order of the groups. An incomplete group serves the front of the batch,
    so that the same sequences draft in every step and their drafts stay up to date."""
    whole = {group.traffic: 0 for group in groups}
    partial: TrafficClass | None = None
    extra, drafts = 0, plan.num_nodes
    for group in groups:
        if group.position > plan.limits[group.method]:
            continue
        if drafts < group.width:
            partial, extra = group.traffic, drafts
            break
        whole[group.traffic] = group.position
        drafts -= group.width
    depths = [
        depth if (depth := whole.get(candidate.traffic, 0)) < candidate.max_depth else candidate.max_depth
        for candidate in batch
    ]
    for i, candidate in enumerate(batch):
        if extra == 0:
            break
        if candidate.traffic == partial and candidate.max_depth > depths[i]:
            depths[i] += 1
            extra -= 1
    return depths


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
