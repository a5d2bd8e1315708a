"""Has a category's acceptance changed? A change-point test, per category, on the first draft of every round.

Only the first draft counts: whether it is accepted depends on draft and traffic, not on how deep a policy happens to go, so
a change of depth is no drift. Rounds of one request resemble each other, and a test that took them for independent would
find a change whenever a long request ends. The unit is therefore a sequence: n_i rounds, of which a_i had their first draft
accepted (one of more than `UNIT` rounds counts as several).

Every few units, each split of the last `KEPT` of them into before and after is looked at:

    p = sum a / sum n        s^2 = m / (m - 2) * sum (a_i - n_i p)^2 / sum n_i^2        V = s^2 * sum n_i^2 / (sum n)^2
    z = (p_after - p_before) / sqrt(V_before + V_after)

s^2, over the m units of both sides, each about its own p, is how much sequences differ: it needs no assumption on how alike
the rounds of one are. V is never taken for less than that of independent rounds, or units that happen to agree would prove
anything. If |z| is at or over `THRESHOLD` for any split whose levels differ by `LEAST_CHANGE`, there was a change: where two
levels fit best. What lies before it is forgotten.

False alarms: on traffic that does not change, fewer than one in 10,000 requests over kinds of traffic that are alike or not;
tests/speculation/drift_simulator.py counts them. Slow change moves through the window as it comes, and estimates that forget
follow it without help.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt

UNIT = 512
"""Rounds of one sequence that make a unit."""
KEPT = 256
"""Units that are remembered."""
BEFORE, AFTER = 20, 12
"""Units that either side of a split must have at the least."""
FEWEST = 4
"""And of the change, once there is no doubt of it."""
THRESHOLD = 5.5
LEAST_CHANGE = 0.1
"""Smaller ones are of no consequence for depth."""
EVERY = 4
"""Units from one look to the next."""


@dataclass(frozen=True, slots=True)
class Change:
    """A category's acceptance of first drafts, before and after."""

    category: str
    before: float
    after: float


@dataclass(slots=True)
class _Unit:
    category: str
    rounds: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _History:
    """The last units of a category, oldest first."""

    rounds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    unseen: int = 0
    """Units since the last look."""

    def add(self, unit: _Unit) -> None:
        self.rounds.append(unit.rounds)
        self.accepted.append(unit.accepted)
        self.unseen += 1
        if len(self.rounds) > KEPT:
            self.forget(1)

    def forget(self, units: int) -> None:
        del self.rounds[:units], self.accepted[:units]


class DriftTest:
    """`observe` every round, `close` sequences that end. One writer, no clock."""

    def __init__(self) -> None:
        self._open: dict[int, _Unit] = {}
        self._histories: dict[str, _History] = {}

    def observe(self, category: str, sequence_id: int, accepted: bool) -> Change | None:
        """A round that had a draft: whether its first token was accepted. Returns the change that has just become certain."""
        unit = self._open.get(sequence_id)
        if unit is None or unit.category != category:
            unit = self._open[sequence_id] = _Unit(category)
        unit.rounds += 1
        unit.accepted += accepted
        if unit.rounds < UNIT:
            return None
        del self._open[sequence_id]
        return self._end(unit)

    def close(self, sequence_ids: Iterable[int]) -> list[Change]:
        """These sequences are over, or were never seen. Returns what has become certain with them."""
        units = [self._open.pop(one) for one in sequence_ids if one in self._open]
        return [change for unit in units if (change := self._end(unit)) is not None]

    def _end(self, unit: _Unit) -> Change | None:
        history = self._histories.setdefault(unit.category, _History())
        history.add(unit)
        if history.unseen < EVERY:
            return None
        history.unseen = 0
        if not _has_changed(history):
            return None
        split = _when(history)
        before = sum(history.accepted[:split]) / sum(history.rounds[:split])
        history.forget(split)
        return Change(unit.category, before, sum(history.accepted) / sum(history.rounds))


def _has_changed(history: _History) -> bool:
    n, a = history.rounds, history.accepted
    count = len(n)
    if count < BEFORE + AFTER:
        return False
    # Prefix sums, so that each split costs the same: sum (a - np)^2 = sum aa - 2p sum an + pp sum nn
    rounds, accepted = list(accumulate(n)), list(accumulate(a))
    aa = list(accumulate(x * x for x in a))
    an = list(accumulate(x * y for x, y in zip(a, n, strict=True)))
    nn = list(accumulate(x * x for x in n))
    for split in range(BEFORE, count - AFTER + 1):
        i = split - 1
        n1, n2 = rounds[i], rounds[-1] - rounds[i]
        p, q = accepted[i] / n1, (accepted[-1] - accepted[i]) / n2
        if abs(q - p) < LEAST_CHANGE:
            continue
        squares = aa[-1] - 2.0 * (p * an[i] + q * (an[-1] - an[i])) + p * p * nn[i] + q * q * (nn[-1] - nn[i])
        spread = count / (count - 2) * max(0.0, squares) / nn[-1]
        level = (accepted[-1] + 1.0) / (rounds[-1] + 2.0)  # of both; never 0 or 1
        alone = level * (1.0 - level)
        variance = max(spread * nn[i] / n1, alone) / n1 + max(spread * (nn[-1] - nn[i]) / n2, alone) / n2
        if abs(q - p) >= THRESHOLD * sqrt(variance):
            return True
    return False


def _when(history: _History) -> int:
    """How many units lie before the change: two levels fit best, by least squares, where sum a^2 / n is largest."""
    rounds, accepted = list(accumulate(history.rounds)), list(accumulate(history.accepted))

    def fit(split: int) -> float:
        n, a = rounds[split - 1], accepted[split - 1]
        return a * a / n + (accepted[-1] - a) ** 2 / (rounds[-1] - n)

    return max(range(FEWEST, len(rounds) - FEWEST + 1), key=fit)
