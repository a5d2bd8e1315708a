"""Spending drafted tokens over a batch so that expected tokens per second are highest. A pure function of estimates.

The k-th draft of a sequence adds S_k = prod_{j<=k} alpha_j expected tokens and one row to the target's pass. With B
sequences, n drafts in all and a deepest draft of D,

    rate = (B + sum of the n chosen S) / (t_verify(B + n) + c0 + c1 D)

Where a proposer asked for drafts has some only at times (`delivery`), both the tokens and the rows of a draft shrink by
that share; what asking costs does not.

For a given D the best n drafts are the n largest S among positions up to D. S never increases with k, so a sequence's
drafts enter in order. Equal S form a group, within which the rate can only peak where t_verify bends upwards: group
ends and such bends are all there is to try.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.speculation.depth.policy import Candidate
from paceline.speculation.depth.step_time import Costs

WORTHLESS = 0.05
"""A draft less likely to be kept than this is left out, even where its row seems to cost nothing."""


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
    """The best allocation that drafts at all; None if no candidate may draft."""
    groups = _groups(batch, values)
    if not groups:
        return None
    seconds, bends = costs.curve, costs.curve.bends
    best_rate, best_deepest, best_asked = 0.0, 0, 0
    for deepest in range(1, max(group.position for group in groups) + 1):
        overhead = (costs.base + costs.per_depth * deepest) / costs.scale
        asked, rows, tokens = 0, float(len(batch)), float(len(batch))
        reached = False
        for survival, position, width, _, delivery in groups:
            if position > deepest:
                continue
            drafts = width * delivery
            # Until a draft of this depth is in, a smaller `deepest` has seen the same for less.
            reached = reached or position == deepest
            if reached:
                first, last = bisect_right(bends, rows), bisect_left(bends, rows + drafts)
                for count in (*[int((bend - rows) / delivery) for bend in bends[first:last]], width):
                    more = count * delivery
                    rate = (tokens + more * survival) / (seconds(rows + more) + overhead)
                    if rate > best_rate and count:
                        best_rate, best_deepest, best_asked = rate, deepest, asked + count
            asked, rows, tokens = asked + width, rows + drafts, tokens + drafts * survival
    return Allocation(_spread(batch, groups, best_deepest, best_asked), best_rate / costs.scale)


class _Group(NamedTuple):
    """The same position of all sequences of a category that may draft so deep."""

    survival: float
    position: int
    width: int
    category: str
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
            groups.append(_Group(survival, position, width, category, value.delivery))
    groups.sort(key=lambda group: (-group.survival, group.position))
    return groups


def _spread(batch: Sequence[Candidate], groups: list[_Group], deepest: int, drafts: int) -> list[int]:
    """Hand out `drafts` in the groups' order. A group cut short serves the front of the batch: step after step the same
    sequences, whose drafts stay warm."""
    whole = {group.category: 0 for group in groups}
    lucky, extra = "", 0
    for group in groups:
        if group.position > deepest:
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
