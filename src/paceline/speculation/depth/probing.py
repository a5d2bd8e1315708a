"""When to draft a little at a loss, only to see. Acceptance cannot be observed at depth 0.

An allowance grows by `share` of a step with every step and pays for each probing step by what that lost, the tokens it gained
taken off: probing then costs no more than half of `share` in time, whatever drafts cost and whatever it takes to catch one up.
A category is due when it has not drafted for its interval, or sooner where little is to be lost. A probe is a burst of
steps until it has seen four rounds. If these are as expected, the interval doubles; if they surprise, four more follow out of
the allowance saved meanwhile, and the estimates decide.

A probe stands until it was seen: who decides twice before a step is taken gets the same answer and pays once. Nor, while
costs are hardly known, is it over with steps that tell no time, such as one that only catches a draft up: the next step
repeats it, twice at most. Deterministic: it counts steps and draws nothing at random.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

FIRST_INTERVAL = 100
LONGEST_INTERVAL = 1600
SEQUENCES = 4
"""Sequences that one probe drafts for, one token each."""
SURPRISE = 0.25
"""By how much a probe's acceptance must exceed what was expected to go on probing."""
ROUNDS = 4
"""Rounds that a probe must see before it is judged."""
UNTIMED = 2
"""Steps without a time after which a probe is repeated at once."""
_SAVINGS = 16.0
_DEAR = 0.5
"""A probe that loses this share of a step costs one step's allowance."""
_LEAST = 0.1
"""Of a step's allowance, what a probe costs that loses nothing. A cheap one is due so much sooner, too."""
_MODERATE = 8.0
_HICCUP = 64.0
"""No step costs more: what takes longer was not the probe."""
_EARN_BACK = 0.97


@dataclass(slots=True)
class _Watch:
    last: int
    interval: float = FIRST_INTERVAL
    in_burst: bool = False
    rounds: int = 0
    kept: int = 0
    price: float = 1.0
    is_new: bool = False
    untimed: int = 0
    gave_up: bool = False
    """Its costs were never learned from a probe: the next pays its full price."""


class Probing:
    def __init__(self, share: float = 0.01) -> None:
        self._share = share
        self._allowance = 2.0
        self._step = 0
        self._watches: dict[str, _Watch] = {}
        self._standing: str | None = None

    @property
    def stands(self) -> bool:
        """Whether a probe was picked that nobody has seen the end of."""
        return self._standing is not None

    def drop(self) -> None:
        """Nobody is left to be probed."""
        self._standing = None

    def tick(self, drafting: Iterable[str]) -> None:
        """A step begins, in which these categories draft anyway."""
        self._step += 1
        self._allowance = min(_SAVINGS, self._allowance + self._share)
        for category in drafting:
            watch = self._watch(category)
            watch.last, watch.in_burst, watch.rounds, watch.kept = self._step, False, 0, 0
            watch.interval = max(FIRST_INTERVAL, watch.interval * _EARN_BACK)

    def pick(self, losses: Mapping[str, float], unsettled: Collection[str] = ()) -> str | None:
        """The category to probe in this step: the one that stands, else of those due the longest unseen. By category: what
        that would lose, as a share of the step. Those `unsettled`, of which that is hardly known, wait for no interval
        and pay a moderate price at most."""
        if self._standing in losses:
            return self._standing
        self._standing = None
        due = []
        for category, loss in losses.items():
            watch, is_new = self._watch(category), category in unsettled
            least, most = 1.0 if is_new else _LEAST, _MODERATE if is_new and not watch.gave_up else math.inf
            price = min(max(least, loss / _DEAR), most)
            is_due = is_new or watch.in_burst or self._step - watch.last >= watch.interval * min(1.0, price)
            if is_due and self._allowance >= min(price, _SAVINGS):
                due.append((watch.last, category, price))
        if due:
            _, self._standing, price = min(due)
            watch = self._watch(self._standing)
            watch.price, watch.is_new = price, self._standing in unsettled
        return self._standing

    def restart(self, category: str) -> None:
        """What is known of the category no longer holds: it is due at once, and then as often as at first."""
        self._watches[category] = _Watch(self._step - FIRST_INTERVAL)

    def is_first(self, category: str) -> bool:
        """Whether the probe just picked opens a burst."""
        return not self._watch(category).in_burst

    def result(
        self, category: str, rounds: int, kept: int, expected: float, loss: float = 0.0, is_timed: bool = True
    ) -> None:
        """A probing step: of its `rounds`, `kept` had their draft accepted, a share `expected` of them was thought to. `loss`
        is as in `pick`; it `is_timed` if the next one will take as long."""
        watch = self._watch(category)
        most = _MODERATE if watch.is_new and not watch.gave_up else _HICCUP
        self._allowance -= min(max(watch.price, loss / _DEAR), most)
        watch.untimed = 0 if is_timed else watch.untimed + 1
        if is_timed or not watch.is_new or watch.untimed > UNTIMED:
            watch.gave_up, watch.untimed = not is_timed, 0
            if self._standing == category:
                self._standing = None
        watch.last, watch.in_burst = self._step, True
        watch.rounds, watch.kept = watch.rounds + rounds, watch.kept + kept
        if watch.rounds >= ROUNDS:
            watch.in_burst = watch.kept / watch.rounds - expected > SURPRISE
            watch.rounds = watch.kept = 0
            if not watch.in_burst:
                watch.interval = min(LONGEST_INTERVAL, watch.interval * 2.0)

    def _watch(self, category: str) -> _Watch:
        return self._watches.setdefault(category, _Watch(self._step))
