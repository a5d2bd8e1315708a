"""Spending drafted tokens over a batch so that expected tokens per second are highest. A pure function of estimates.

The k-th node drafted for a sequence adds S_k expected tokens, the chance that it is accepted, and one row to the
target's pass. With B sequences, n nodes in all, and D_m the most that method m drafts for any of its sequences,

    rate = (B + sum of the n chosen S) / (t_verify(B + n) + t_network + sum_m (c0_m + c1_m D_m))

Where a proposer asked for drafts has some only at times (`delivery`), both the tokens and the rows of a draft shrink by
that share; what asking costs does not.

For given D_m the best n nodes are the n largest S among positions up to D_m. S never increases with k, so a sequence's
nodes enter in order. Equal S form a group, within which the rate can only peak where t_verify bends upwards: group
ends and such bends are all there is to try. With one method every D up to `EVERY_DEPTH` is tried and some beyond, where
one node more or less makes little difference; several methods take turns until none of them gains.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.speculation.depth.policy import Candidate, method_of
from paceline.speculation.depth.step_time import Costs

WORTHLESS = 0.01
"""A draft less likely to be kept than this is left out, even where its row seems to cost nothing."""
EVERY_DEPTH = 8
SWEEPS = 4


@dataclass(frozen=True, slots=True)
class Allocation:
    """`depths` beside the expected tokens per second they give."""

    depths: list[int]
    rate: float


@dataclass(frozen=True, slots=True)
class Value:
    """What a category's drafts are worth: S by position, and the chance that asking for drafts yields any."""

    survival: Sequence[float]
    delivery: float = 1.0


def allocate(batch: Sequence[Candidate], values: Mapping[str, Value], costs: Costs) -> Allocation | None:
    """The best allocation that drafts at all; None if no candidate may draft. Every category with a value has a method
    whose costs are known."""
    groups = _groups(batch, values)
    if not groups:
        return None
    methods = dict.fromkeys([group.method for group in groups])
    tries = {m: _depths_to_try(max(group.position for group in groups if group.method == m)) for m in methods}
    best = _Plan(0.0, 0, dict.fromkeys(methods, 0))
    for _ in range(SWEEPS):
        before = best.rate
        for method in methods:
            below = -1 if len(methods) > 1 else 0
            for deepest in (0, *tries[method]) if len(methods) > 1 else tries[method]:
                limits = {**best.limits, method: deepest}
                best = max(best, _fill(groups, limits, method, below, len(batch), costs), key=lambda plan: plan.rate)
                below = deepest
        if len(methods) == 1 or best.rate == before:
            break
    return Allocation(_spread(batch, groups, best), best.rate / costs.scale)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The `asked` most valuable nodes among positions up to each method's limit. `rate` is for a scale of 1."""

    rate: float
    asked: int
    limits: Mapping[str, int]


class _Group(NamedTuple):
    """The same position of all sequences of a category that may draft so deep."""

    survival: float
    position: int
    width: int
    category: str
    method: str
    delivery: float


def _groups(batch: Sequence[Candidate], values: Mapping[str, Value]) -> list[_Group]:
    """All positions of all categories, most valuable row first; of equals the shallower."""
    groups = []
    caps = Counter([(candidate.category, candidate.max_depth) for candidate in batch])
    for category, value in values.items():
        own = [(cap, count) for (name, cap), count in caps.items() if name == category]
        for position, survival in enumerate(value.survival, start=1):
            if survival < WORTHLESS:
                break
            width = sum([count for cap, count in own if cap >= position])
            if width == 0:
                break
            groups.append(_Group(survival, position, width, category, method_of(category), value.delivery))
    groups.sort(key=lambda group: (-group.survival, group.position))
    return groups


def _depths_to_try(most: int) -> list[int]:
    """1, 2, ... 8, 10, 12, 15, 18, 22, 27, ... and the most."""
    depths = [1]
    while depths[-1] < most:
        step = 1 if depths[-1] < EVERY_DEPTH else depths[-1] // 4
        depths.append(min(most, depths[-1] + step))
    return depths


def _fill(
    groups: Sequence[_Group], limits: Mapping[str, int], method: str, below: int, batch: int, costs: Costs
) -> _Plan:
    """The best number of nodes within `limits`, of those that take `method` beyond `below`: a smaller limit has tried the
    others."""
    seconds, bends = costs.curve, costs.curve.bends
    best_rate, best_asked = 0.0, 0
    asked, rows, tokens, overhead = 0, float(batch), float(batch), costs.network / costs.scale
    reached = dict.fromkeys(limits, 0)
    is_new = below < 0
    for survival, position, width, _, own, delivery in groups:
        if position > limits[own]:
            continue
        if position > reached[own]:
            line = costs.lines[own]
            overhead += (line.seconds(position) - (line.seconds(reached[own]) if reached[own] else 0.0)) / costs.scale
            reached[own] = position
            is_new = is_new or (own == method and position > below)
        drafts = width * delivery
        if is_new:
            first, last = bisect_right(bends, rows), bisect_left(bends, rows + drafts)
            for count in (*[int((bend - rows) / delivery) for bend in bends[first:last]], width):
                more = count * delivery
                rate = (tokens + more * survival) / (seconds(rows + more) + overhead)
                if rate > best_rate and count:
                    best_rate, best_asked = rate, asked + count
        asked, rows, tokens = asked + width, rows + drafts, tokens + drafts * survival
    return _Plan(best_rate, best_asked, limits)


def _spread(batch: Sequence[Candidate], groups: Sequence[_Group], plan: _Plan) -> list[int]:
    """Hand out the nodes in the groups' order. A group cut short serves the front of the batch: step after step the same
    sequences, whose drafts stay warm."""
    whole = {group.category: 0 for group in groups}
    lucky, extra, drafts = "", 0, plan.asked
    for group in groups:
        if group.position > plan.limits[group.method]:
            continue
        if drafts < group.width:
            lucky, extra = group.category, drafts
            break
        whole[group.category] = group.position
        drafts -= group.width
    depths = [
        depth if (depth := whole.get(candidate.category, 0)) < candidate.max_depth else candidate.max_depth
        for candidate in batch
    ]
    for i, candidate in enumerate(batch):
        if extra == 0:
            break
        if candidate.category == lucky and candidate.max_depth > depths[i]:
            depths[i] += 1
            extra -= 1
    return depths
