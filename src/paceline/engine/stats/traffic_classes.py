"""Traffic told apart by what acceptance depends on: how tokens are guessed, and what kind of text they are."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable

from paceline.core.sequence import Sequence
from paceline.core.worker_status import TrafficStatus
from paceline.engine.stats.tally import BREAKER, DECLINED, NO_DRAFT, NO_ROOM, Tally
from paceline.speculation.depth.breaker import Breaker
from paceline.speculation.depth.drift import Change, DriftTest
from paceline.speculation.depth.policy import RoundObservation

logger = logging.getLogger(__name__)


def traffic_class(sequence: Sequence) -> str:
    return f"{sequence.method}/{sequence.category}"


class TrafficClasses:
    """By class: the breaker, the test for change, and counts for reports."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.drift = DriftTest()
        self._tallies: defaultdict[str, Tally] = defaultdict(Tally)

    def observe(self, rounds: Iterable[RoundObservation], now: float, advantage: float | None) -> list[Change]:
        """Rounds of one step, at the `advantage` they were decided by. Returns the classes that have changed."""
        changes = []
        for round_ in rounds:
            tally = self._tallies[round_.category]
            if not round_.drafted:
                tally.fallback(NO_DRAFT)
                continue
            tally.round(round_.drafted, round_.accepted)
            self.breaker.record(round_.category, round_.drafted, round_.accepted, now, advantage)
            change = self.drift.observe(round_.category, round_.sequence_id, round_.is_first_accepted)
            if change is not None:
                changes.append(change)
        return self._noted(changes)

    def close(self, sequence_ids: Iterable[int]) -> list[Change]:
        """All has been observed of these sequences. Returns the classes that have changed with them."""
        return self._noted(self.drift.close(sequence_ids))

    def decided(self, category: str, depth: int, is_allowed: bool, count: int = 1) -> None:
        """The depth of so many sequences that wanted drafts. `is_allowed`: the breaker let them have some."""
        tally = self._tallies[category]
        tally.depth(depth, count)
        if depth == 0:
            tally.fallback(DECLINED if is_allowed else BREAKER, count)

    def declined(self, categories: Iterable[str]) -> None:
        """Nobody was drafted for, these sequences among them, which wanted drafts."""
        for category, count in Counter(categories).items():
            self.decided(category, 0, True, count)

    def had_no_room(self, category: str, count: int = 1) -> None:
        """So many wanted drafts, and no rows or blocks were left for them."""
        self._tallies[category].fallback(NO_ROOM, count)

    def report(self) -> tuple[TrafficStatus, ...]:
        reports = []
        for name, tally in self._tallies.items():
            method, _, category = name.partition("/")
            reports.append(tally.report(method, category, self.breaker.state(name)))
        return tuple(reports)

    def _noted(self, changes: list[Change]) -> list[Change]:
        for change in changes:
            method, _, category = change.category.partition("/")
            self._tallies[change.category].drifted(change)
            logger.warning(
                "acceptance of %s drafts for %r went from %.2f to %.2f: depth is learned anew",
                method,
                category,
                change.before,
                change.after,
                extra={"category": category, "method": method},
            )
        return changes
