"""The fourth way speculation goes wrong: sequences lose their seats for lack of cache while drafts take some of it."""

import logging
from dataclasses import replace

from paceline.cluster.cost.symptoms import SymptomWatch, Vitals
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import EngineStatus, Symptom

logger = logging.getLogger(__name__)

LOOKS = 3
"""In a row that must agree, about a second apart."""
DEPTH = 1
"""What is left of speculation under pressure."""


class KvPressure:
    """Watches preemptions a step. Under pressure `limit` bounds the depth; the operator's flags hold otherwise."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(LOOKS)
        self._last: tuple[int, int] | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, snapshot: EngineStatus, steps: int) -> bool:
        """Returns whether the pressure set in or ended."""
        before, now = self._last, (snapshot.preemptions, steps)
        self._last = now
        if before is None:
            return False
        lost, steps_between = now[0] - before[0], now[1] - before[1]
        if not steps_between and (snapshot.running or snapshot.waiting):  # a long step, which says nothing yet
            return False
        rate = lost / steps_between if steps_between else 0.0
        was = bool(self.active)
        for symptom in self._watch.observe(Vitals(preemptions=rate if snapshot.flags.enabled else 0.0)):
            logger.warning("%s", symptom)
        return bool(self.active) != was

    def limit(self, flags: SpeculationFlags) -> SpeculationFlags:
        if not self.active:
            return flags
        return replace(flags, max_depth=DEPTH if flags.max_depth is None else min(DEPTH, flags.max_depth))
