"""What speculation did for one class of traffic, counted for reports. Nothing is decided by it."""

from collections import Counter

from paceline.core.worker_status import BreakerState, TrafficStatus
from paceline.speculation.depth.acceptance import known_positions
from paceline.speculation.depth.drift import Change

DECLINED = "declined"
"""The depth policy expects plain decoding to be faster."""
BREAKER = "breaker"
"""The breaker is open, or half open and another sequence probes."""
NO_ROOM = "no_room"
"""No rows or blocks were left for drafts."""
NO_DRAFT = "no_draft"
"""The proposer was asked and had nothing, was late, or its draft was invalid."""
FALLBACKS = (DECLINED, BREAKER, NO_ROOM, NO_DRAFT)

_KEEP = 1.0 - 1.0 / 128.0


class Tally:
    """Means over about 128 rounds, and counts."""

    def __init__(self) -> None:
        self._hits: list[float] = []
        self._trials: list[float] = []
        self._depths = 0.0
        self._decisions = 0.0
        self._fallbacks: Counter[str] = Counter(dict.fromkeys(FALLBACKS, 0))
        self._tested = self._kept = self._drifts = 0
        self._drift: tuple[float, float] | None = None

    def round(self, drafted: int, accepted: int) -> None:
        """One round. alpha_i = accepted at i / tested at i; what lies after the first rejection was not tested."""
        known = known_positions(drafted, accepted)
        self._tested += known
        self._kept += accepted
        missing = known - len(self._trials)
        if missing > 0:
            self._hits += [0.0] * missing
            self._trials += [0.0] * missing
        for i in range(known):
            self._trials[i] = _KEEP * self._trials[i] + 1.0
            self._hits[i] = _KEEP * self._hits[i] + (i < accepted)

    def depth(self, depth: int, count: int = 1) -> None:
        """As many decisions for it, one after another."""
        kept = _KEEP**count
        new = (1.0 - kept) / (1.0 - _KEEP)
        self._depths = kept * self._depths + new * depth
        self._decisions = kept * self._decisions + new

    def fallback(self, reason: str, count: int = 1) -> None:
        self._fallbacks[reason] += count

    def drifted(self, change: Change) -> None:
        self._drifts += 1
        self._drift = (change.before, change.after)

    def report(self, method: str, category: str, breaker: BreakerState) -> TrafficStatus:
        return TrafficStatus(
            method=method,
            category=category,
            breaker=breaker,
            alphas=tuple(hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)),
            mean_depth=self._depths / self._decisions if self._decisions else 0.0,
            fallbacks=dict(self._fallbacks),
            tested=self._tested,
            kept=self._kept,
            drifts=self._drifts,
            drift=self._drift,
        )
