"""Statistics of an engine for reports: time by part of a step, and speculation by traffic class. No decision uses them,
except the breaker and the drift test of each class, which the engine reads here."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from paceline.core.status.engine import BreakerState, TrafficStatus
from paceline.core.traffic import TrafficClass
from paceline.speculation.depth.acceptance import known_positions
from paceline.speculation.depth.breaker import Breaker
from paceline.speculation.depth.drift import AcceptanceChange, DriftTest
from paceline.speculation.depth.policy import RoundObservation

logger = logging.getLogger(__name__)

DRAFT, NETWORK, VERIFY = "draft", "network", "verify"
"""Parts of a drafting step: drafting, the network's share of the wait for drafts, and the target's pass."""
PLAIN = "plain"
"""A step without drafts."""
PROMPT = "prompt"
"""A step with prefill. Its time is counted apart from that of other steps."""

DECLINED = "declined"
"""The depth policy expects plain decoding to be faster."""
BREAKER = "breaker"
"""The breaker is open, or half open and another sequence probes."""
NO_ROOM = "no_room"
"""No rows or blocks were left for drafts."""
NO_DRAFT = "no_draft"
"""The proposer returned no draft in time, or an invalid one."""
FALLBACKS = (DECLINED, BREAKER, NO_ROOM, NO_DRAFT)
"""Reasons for which a sequence with speculation decoded plainly."""

_DECAY = 1.0 - 1.0 / 128.0


class StepTotals:
    """Time of steps by part. One thread writes; any thread may read."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((DRAFT, NETWORK, VERIFY, PLAIN, PROMPT), 0.0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by part, since the start; a copy."""
        return dict(self._seconds)

    def add(self, prefill_rows: int, drafted: bool, draft: float, network: float, verify: float) -> None:
        """Add one step. `drafted` is true if drafts were requested for it."""
        if prefill_rows:
            self._seconds[PROMPT] += draft + network + verify
        elif drafted:
            self._seconds[DRAFT] += draft
            self._seconds[NETWORK] += network
            self._seconds[VERIFY] += verify
        else:
            self._seconds[PLAIN] += draft + network + verify


class ClassCounts:
    """Counts of one traffic class, and means over about 128 rounds."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._trials: list[float] = []
        self._depths = 0.0
        self._decisions = 0.0
        self._fallbacks: Counter[str] = Counter(dict.fromkeys(FALLBACKS, 0))
        self._tested = self._accepted = self._drifts = 0
        self._drift: tuple[float, float] | None = None

    def add_round(self, drafted: int, accepted: int) -> None:
        """Count one round. alpha_i = accepted at i / tested at i; positions after the first rejection are not tested."""
        known = known_positions(drafted, accepted)
        self._tested += known
        self._accepted += accepted
        missing = known - len(self._trials)
        if missing > 0:
            self._hits += [0.0] * missing
            self._trials += [0.0] * missing
        for i in range(known):
            self._trials[i] = _DECAY * self._trials[i] + 1.0
            self._hits[i] = _DECAY * self._hits[i] + (i < accepted)

    def add_depth(self, depth: int, count: int = 1) -> None:
        """Count `count` decisions for this depth, one after another."""
        kept = _DECAY**count
        new = (1.0 - kept) / (1.0 - _DECAY)
        self._depths = kept * self._depths + new * depth
        self._decisions = kept * self._decisions + new

    def add_fallback(self, reason: str, count: int = 1) -> None:
        self._fallbacks[reason] += count

    def add_drift(self, change: AcceptanceChange) -> None:
        self._drifts += 1
        self._drift = (change.before, change.after)

    @property
    def first_alpha(self) -> float | None:
        """The recent acceptance of first drafts. None if no draft was verified."""
        return self._hits[0] / self._trials[0] if self._trials else None

    def report(self, traffic: TrafficClass, breaker: BreakerState) -> TrafficStatus:
        return TrafficStatus(
            method=traffic.method,
            category=traffic.shown_category,
            breaker=breaker,
            alphas=tuple(hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)),
            mean_depth=self._depths / self._decisions if self._decisions else 0.0,
            fallbacks=dict(self._fallbacks),
            tested=self._tested,
            kept=self._accepted,
            drifts=self._drifts,
            drift=self._drift,
        )


class TrafficStatistics:
    """Holds the breaker, the drift test, and the counts for reports of every traffic class."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.drift = DriftTest()
        self._counts: defaultdict[TrafficClass, ClassCounts] = defaultdict(ClassCounts)

    def observe(
        self, rounds: Iterable[RoundObservation], now: float, advantage: float | None
    ) -> list[AcceptanceChange]:
        """Count the rounds of one step, decided at that `advantage`. Returns the classes that have changed."""
        changes = []
        for round_ in rounds:
            counts = self._counts[round_.traffic]
            if not round_.drafted:
                counts.add_fallback(NO_DRAFT)
                continue
            counts.add_round(round_.drafted, round_.accepted)
            self.breaker.record(round_.traffic, round_.drafted, round_.accepted, now, advantage)
            change = self.drift.observe(round_.traffic, round_.sequence_id, round_.is_first_accepted)
            if change is not None:
                changes.append(change)
        return self._log(changes)

    def close(self, sequence_ids: Iterable[int]) -> list[AcceptanceChange]:
        """End these sequences, whose rounds are all observed. Returns the classes that have changed with them."""
        return self._log(self.drift.close(sequence_ids))

    def count_decision(self, traffic: TrafficClass, depth: int, is_allowed: bool, count: int = 1) -> None:
        """Count the depth of `count` sequences that may draft by their request. `is_allowed` is true if the breaker allows it
        too."""
        counts = self._counts[traffic]
        counts.add_depth(depth, count)
        if depth == 0:
            counts.add_fallback(DECLINED if is_allowed else BREAKER, count)

    def count_declined(self, classes: Iterable[TrafficClass]) -> None:
        """Count a plain step without a decision. `classes` are those of the sequences that may draft by their request."""
        for traffic, count in Counter(classes).items():
            self.count_decision(traffic, 0, True, count)

    def count_no_room(self, traffic: TrafficClass, count: int = 1) -> None:
        """Count `count` sequences for whose drafts no rows or blocks were left."""
        self._counts[traffic].add_fallback(NO_ROOM, count)

    def restart(self, traffic: TrafficClass) -> None:
        """Discard what the breaker and the drift test know of a class. Its counts stay."""
        self.breaker.reset(traffic)
        self.drift.forget(traffic)

    def report(self) -> tuple[TrafficStatus, ...]:
        return tuple(counts.report(traffic, self.breaker.state(traffic)) for traffic, counts in self._counts.items())

    def first_alphas(self) -> dict[TrafficClass, float | None]:
        """The recent acceptance of the first drafts of every class. None if no draft was verified."""
        return {traffic: counts.first_alpha for traffic, counts in self._counts.items()}

    def _log(self, changes: list[AcceptanceChange]) -> list[AcceptanceChange]:
        for change in changes:
            method, category = change.traffic.method, change.traffic.shown_category
            self._counts[change.traffic].add_drift(change)
            logger.warning(
                "acceptance of %s drafts for %r changed from %.2f to %.2f: the depth policy restarts for this class",
                method,
                category,
                change.before,
                change.after,
                extra={"category": category, "method": method},
            )
        return changes
