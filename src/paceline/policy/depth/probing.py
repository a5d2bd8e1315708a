"""When to draft a little at a loss, only to measure acceptance: it cannot be observed at depth 0.

Every step adds `share` of a step to a budget. A probing step pays by the time it lost, less the tokens that it gained. Probing
then costs at most half of `share` of the time, whatever drafts and draft prefills cost.

A traffic class is due when it has not drafted for its interval, or sooner if a probe costs little. A probe is a burst of steps
until four rounds are observed. If their acceptance is as expected, the interval doubles. If it is higher, four more rounds
follow out of the saved budget, and the estimates decide.

A picked probe stays pending until its step is observed: a second decision before that step gets the same answer and pays
once. While the costs of a method are hardly known, an untimed step, such as one with a draft prefill, does not end its probe:
the next step repeats it, at most twice. Deterministic: it counts steps and draws nothing at random.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.traffic import TrafficClass

FIRST_INTERVAL = 100
LONGEST_INTERVAL = 1600
SEQUENCES = 4
"""Sequences that one probe drafts for, one token each."""
SURPRISE = 0.25
"""Acceptance over expectation above which a probe continues."""
ROUNDS = 4
"""Rounds that a probe must observe before it is judged."""
MAX_UNTIMED = 2
"""Untimed steps after which a probe is repeated at once."""
_MAX_BUDGET = 16.0
_LOSS_PER_UNIT = 0.5
"""Share of a step, lost by a probe, that costs one unit of the budget."""
_MIN_PRICE = 0.1
"""Price of a probe that loses nothing. A cheap probe is due sooner by the same factor."""
_MAX_NEW_PRICE = 8.0
"""Highest price of a probe of a traffic class whose cost is hardly known."""
_MAX_PRICE = 64.0
"""Highest price of any probing step: a longer delay had another cause."""
_INTERVAL_DECAY = 0.97
"""Factor on the interval for each step in which the traffic class drafts."""


@dataclass(slots=True)
class _Watch:
    last: int
    interval: float = FIRST_INTERVAL
    in_burst: bool = False
    rounds: int = 0
    accepted: int = 0
    price: float = 1.0
    is_new: bool = False
    num_untimed: int = 0
    is_untimed: bool = False
    """The last probe ended without a time: the next one pays its full price."""


class Probing:
    def __init__(self, share: float = 0.01) -> None:
        self._share = share
        self._budget = 2.0
        self._step = 0
        self._watches: dict[TrafficClass, _Watch] = {}
        self._pending: TrafficClass | None = None

    @property
    def is_pending(self) -> bool:
        """Whether a probe was picked whose step is not observed yet."""
        return self._pending is not None

    def cancel(self) -> None:
        """No candidate is left for the pending probe."""
        self._pending = None

    def begin_step(self, drafting: Iterable[TrafficClass]) -> None:
        """A step begins, in which these classes draft because it pays."""
        self._step += 1
        self._budget = min(_MAX_BUDGET, self._budget + self._share)
        for traffic in drafting:
            watch = self._watch(traffic)
            watch.last, watch.in_burst, watch.rounds, watch.accepted = self._step, False, 0, 0
            watch.interval = max(FIRST_INTERVAL, watch.interval * _INTERVAL_DECAY)

    def pick(
        self, losses: Mapping[TrafficClass, float], unsettled: Collection[TrafficClass] = ()
    ) -> TrafficClass | None:
        """The traffic class to probe in this step. It is the pending one, or of those due the one unobserved for longest.

        `losses` is what a probe of each class would lose, as a share of the step. The loss of an `unsettled` class is
        hardly known. Such a class waits for no interval and pays at most a moderate price.
        """
        if self._pending in losses:
            return self._pending
        self._pending = None
        due = []
        for traffic, loss in losses.items():
            watch, is_new = self._watch(traffic), traffic in unsettled
            least, most = 1.0 if is_new else _MIN_PRICE, _MAX_NEW_PRICE if is_new and not watch.is_untimed else math.inf
            price = min(max(least, loss / _LOSS_PER_UNIT), most)
            is_due = is_new or watch.in_burst or self._step - watch.last >= watch.interval * min(1.0, price)
            if is_due and self._budget >= min(price, _MAX_BUDGET):
                due.append((watch.last, traffic, price))
        if due:
            _, self._pending, price = min(due)
            watch = self._watch(self._pending)
            watch.price, watch.is_new = price, self._pending in unsettled
        return self._pending

    def restart(self, traffic: TrafficClass) -> None:
        """The traffic class has changed: it is due at once, and then as often as a new one."""
        self._watches[traffic] = _Watch(self._step - FIRST_INTERVAL)

    def is_first(self, traffic: TrafficClass) -> bool:
        """Whether the probe just picked starts a burst."""
        return not self._watch(traffic).in_burst

    def observe(
        self,
        traffic: TrafficClass,
        rounds: int,
        accepted: int,
        expected: float,
        loss: float = 0.0,
        is_timed: bool = True,
    ) -> None:
        """Count a probing step. In `accepted` of its `rounds` the first draft was accepted, and `expected` is the expected
        share. `loss` is as in `pick`. `is_timed` is true if the next such step takes as long."""
        watch = self._watch(traffic)
        most = _MAX_NEW_PRICE if watch.is_new and not watch.is_untimed else _MAX_PRICE
        self._budget -= min(max(watch.price, loss / _LOSS_PER_UNIT), most)
        watch.num_untimed = 0 if is_timed else watch.num_untimed + 1
        if is_timed or not watch.is_new or watch.num_untimed > MAX_UNTIMED:
            watch.is_untimed, watch.num_untimed = not is_timed, 0
            if self._pending == traffic:
                self._pending = None
        watch.last, watch.in_burst = self._step, True
        watch.rounds, watch.accepted = watch.rounds + rounds, watch.accepted + accepted
        if watch.rounds >= ROUNDS:
            watch.in_burst = watch.accepted / watch.rounds - expected > SURPRISE
            watch.rounds = watch.accepted = 0
            if not watch.in_burst:
                watch.interval = min(LONGEST_INTERVAL, watch.interval * 2.0)

    def _watch(self, traffic: TrafficClass) -> _Watch:
        return self._watches.setdefault(traffic, _Watch(self._step))
