"""A change-point test per traffic class on the acceptance of the first draft of every round.

Only the first draft counts: its acceptance depends on draft and traffic and not on the depth, so that a change of depth is no
drift. Rounds of one request resemble each other: a test that took them for independent would find a change whenever a long
request ends. The unit is therefore a sequence: n_i rounds, in a_i of which the first draft was accepted (a sequence of more
than `UNIT` rounds counts as several).

Sequences with many accepted drafts end sooner than the rest. Of a batch that starts together they would come first, as if
acceptance had risen and then fallen. Units are therefore in the order of their first rounds, and a unit that has ended waits
until all units before it have ended.

Every few units the test tries each split of the last `KEPT` units into before and after:

    p = sum a / sum n        s^2 = m / (m - 2) * sum (a_i - n_i p)^2 / sum n_i^2        V = s^2 * sum n_i^2 / (sum n)^2
    z = (p_after - p_before) / sqrt(V_before + V_after)

s^2, over the m units before and after, each about its own p, measures how much sequences differ. It needs no assumption on how
similar the rounds of one sequence are. V is at least that of independent rounds, because a few units may agree by chance.
If |z| >= `THRESHOLD` for any split whose levels differ by `MIN_CHANGE`, acceptance has changed; the change is where two
levels fit best. The units before it are forgotten.

False alarms: fewer than one in 10,000 requests on traffic that does not change; tests/policy/depth/drift_simulator.py
counts them. Slow change needs no test: the decaying estimates follow it.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import sqrt

from paceline.core.traffic import TrafficClass

UNIT = 512
"""Rounds of one sequence that form a unit."""
KEPT = 256
"""Units remembered per traffic class."""
MIN_BEFORE, MIN_AFTER = 20, 12
"""Smallest number of units on either side of a split."""
MIN_UNITS = 4
"""Smallest number of units on either side of the located change."""
THRESHOLD = 5.5
MIN_CHANGE = 0.1
"""Change of acceptance that matters for depth."""
EVERY = 4
"""Units between two tests."""


@dataclass(frozen=True, slots=True)
class AcceptanceChange:
    """The acceptance of a traffic class's first drafts, before and after a change."""

    traffic: TrafficClass
    before: float
    after: float


@dataclass(slots=True, eq=False)
class _Unit:
    traffic: TrafficClass
    rounds: int = 0
    accepted: int = 0
    has_ended: bool = False


@dataclass(slots=True)
class _History:
    """The last units of a traffic class, oldest first."""

    rounds: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    waiting: deque[_Unit] = field(default_factory=deque)
    """The first one has not ended; those after it began later."""
    num_untested: int = 0
    """Units since the last test."""

    def begin(self, unit: _Unit) -> None:
        self.waiting.append(unit)
        if len(self.waiting) > KEPT:
            self.waiting.popleft()  # it has outlasted many other units: it counts no more
            self.advance()

    def advance(self) -> None:
        """Add the units that no other has to wait for."""
        while self.waiting and self.waiting[0].has_ended:
            unit = self.waiting.popleft()
            self.rounds.append(unit.rounds)
            self.accepted.append(unit.accepted)
            self.num_untested += 1
        self.forget(max(0, len(self.rounds) - KEPT))

    def forget(self, units: int) -> None:
        del self.rounds[:units], self.accepted[:units]


class DriftTest:
    """`observe` every round and `close` sequences that end."""

    def __init__(self) -> None:
        self._open: dict[int, _Unit] = {}
        self._histories: dict[TrafficClass, _History] = {}

    def observe(self, traffic: TrafficClass, sequence_id: int, accepted: bool) -> AcceptanceChange | None:
        """Count a round with a draft. `accepted` is true if its first token was accepted. Returns a change if this round proves
        one."""
        unit = self._open.get(sequence_id)
        if unit is not None and unit.traffic != traffic:
            self._end(unit)
            unit = None
        if unit is None:
            unit = self._open[sequence_id] = _Unit(traffic)
            self._history(traffic).begin(unit)
        unit.rounds += 1
        unit.accepted += accepted
        if unit.rounds < UNIT:
            return None
        del self._open[sequence_id]
        return self._end(unit)

    def close(self, sequence_ids: Iterable[int]) -> list[AcceptanceChange]:
        """End these sequences; unknown ids are ignored. Returns the changes that were found with them."""
        units = [self._open.pop(sequence_id) for sequence_id in sequence_ids if sequence_id in self._open]
        return [change for unit in units if (change := self._end(unit)) is not None]

    def forget(self, traffic: TrafficClass) -> None:
        """Discard the units of the traffic class: its draft is another one from now on."""
        self._histories.pop(traffic, None)

    def _history(self, traffic: TrafficClass) -> _History:
        return self._histories.setdefault(traffic, _History())

    def _end(self, unit: _Unit) -> AcceptanceChange | None:
        unit.has_ended = True
        history = self._history(unit.traffic)
        history.advance()
        if history.num_untested < EVERY:
            return None
        history.num_untested = 0
        if not _has_changed(history):
            return None
        split = _change_point(history)
        before = sum(history.accepted[:split]) / sum(history.rounds[:split])
        history.forget(split)
        return AcceptanceChange(unit.traffic, before, sum(history.accepted) / sum(history.rounds))


def _has_changed(history: _History) -> bool:
    n, a = history.rounds, history.accepted
    count = len(n)
    if count < MIN_BEFORE + MIN_AFTER:
        return False
    # Prefix sums, so that a split costs constant time: sum (a - np)^2 = sum aa - 2p sum an + pp sum nn
    rounds, accepted = list(accumulate(n)), list(accumulate(a))
    aa = list(accumulate(x * x for x in a))
    an = list(accumulate(x * y for x, y in zip(a, n, strict=True)))
    nn = list(accumulate(x * x for x in n))
    for split in range(MIN_BEFORE, count - MIN_AFTER + 1):
        i = split - 1
        n1, n2 = rounds[i], rounds[-1] - rounds[i]
        p, q = accepted[i] / n1, (accepted[-1] - accepted[i]) / n2
        if abs(q - p) < MIN_CHANGE:
            continue
        squares = aa[-1] - 2.0 * (p * an[i] + q * (an[-1] - an[i])) + p * p * nn[i] + q * q * (nn[-1] - nn[i])
        spread = count / (count - 2) * max(0.0, squares) / nn[-1]
        level = (accepted[-1] + 1.0) / (rounds[-1] + 2.0)  # of before and after together; never 0 or 1
        alone = level * (1.0 - level)
        variance = max(spread * nn[i] / n1, alone) / n1 + max(spread * (nn[-1] - nn[i]) / n2, alone) / n2
        if abs(q - p) >= THRESHOLD * sqrt(variance):
            return True
    return False


def _change_point(history: _History) -> int:
    """The number of units before the change: the least-squares fit of two levels, where sum a^2 / n is largest."""
    rounds, accepted = list(accumulate(history.rounds)), list(accumulate(history.accepted))

    def fit(split: int) -> float:
        n, a = rounds[split - 1], accepted[split - 1]
        return a * a / n + (accepted[-1] - a) ** 2 / (rounds[-1] - n)

    return max(range(MIN_UNITS, len(rounds) - MIN_UNITS + 1), key=fit)
