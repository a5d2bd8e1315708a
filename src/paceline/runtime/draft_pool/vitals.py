"""How drafting with a pool goes of late, seen from a target: what it gains, what it costs, what is wrong with it."""

import logging
from collections.abc import Iterable

from paceline.cluster.cost.symptoms import Symptom, SymptomWatch, Vitals
from paceline.runtime.draft_pool.connection import DraftLink
from paceline.runtime.wire.messages import MAX_DEPTH

logger = logging.getLogger(__name__)

AHEAD_SHARE = 0.05
"""Where a round trip is mostly longer than this share of a step, drafts are asked to be sent before the verdict is known."""
SLOWEST = 16.0
"""Recent figures follow new ones by one part in this many."""
STALE = 10.0
"""Seconds without a step after which nothing is said to be wrong: nobody speculates."""
LOOK_EVERY = 4
"""Steps from one look for symptoms to the next: figures that move so slowly need no closer one."""


class _Average:
    """Follows a figure that changes."""

    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) / SLOWEST


class PoolVitals:
    """Figures in, and the two answers that lie with the target: how deep to ask, and whether to have drafts sent ahead."""

    def __init__(self) -> None:
        self._step, self._gain, self._depth = _Average(), _Average(), _Average()
        self._watch = SymptomWatch()
        self._steps = 0
        self._looked = 0.0

    @property
    def step(self) -> float | None:
        """Seconds of a target's step without drafts."""
        return self._step.value

    @property
    def gain(self) -> float:
        """Tokens that a draft adds to its sequence's step."""
        return self._gain.value or 1.0

    def symptoms(self, now: float) -> tuple[Symptom, ...]:
        """What goes wrong these days. Any thread may ask."""
        return self._watch.active if now - self._looked < STALE else ()

    def timed(self, step: float) -> None:
        self._step.observe(step)

    def verified(self, offered: int, accepted: int) -> None:
        """A round that had a draft."""
        self._depth.observe(offered)
        self._gain.observe(accepted)

    def wants_ahead(self, link: DraftLink) -> bool:
        trip, step = link.round_trip.usual, self._step.value
        return trip is not None and step is not None and trip > AHEAD_SHARE * step

    def depth_cap(self, link: DraftLink) -> int:
        """A draft slower than the verification is asked for less: as many tokens as it drafts in that time."""
        if not self._watch.has("slow_draft") or not link.load.pass_us or self._step.value is None:
            return MAX_DEPTH
        return min(MAX_DEPTH, max(1, int(self._step.value / (link.load.pass_us * 1e-6))))

    def look(self, links: Iterable[DraftLink], now: float) -> None:
        """Once a step: log what has just gone wrong."""
        self._looked = now
        self._steps += 1
        if self._steps % LOOK_EVERY:
            return
        up = [link for link in links if link.is_up]
        passes = [link.load.pass_us * 1e-6 for link in up if link.load.pass_us]
        trips = [link.round_trip.seconds for link in up if link.round_trip.seconds is not None]
        depth = self._depth.value
        vitals = Vitals(
            accepted=self._gain.value,
            depth=depth,
            draft_seconds=min(passes) * depth if passes and depth else None,
            verify_seconds=self._step.value,
            round_trip=min(trips, default=None),
        )
        for symptom in self._watch.observe(vitals):
            logger.warning("%s", symptom)
