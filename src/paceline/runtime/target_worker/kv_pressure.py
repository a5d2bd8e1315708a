"""Limits the depth while sequences are preempted for lack of cache blocks, some of which hold drafts."""

import logging
from dataclasses import replace

from paceline.cluster.cost.symptoms import Measurements, SymptomWatch
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import EngineStatus, Symptom

logger = logging.getLogger(__name__)

PERSISTENCE = 3
"""Observations in a row, about a second apart, that start or end the limit."""
LIMITED_DEPTH = 1


class KvPressure:
    """Watches preemptions per step. While they persist, `limit` bounds the depth of the operator's flags."""

    def __init__(self) -> None:
        self._watch = SymptomWatch(PERSISTENCE)
        self._last: tuple[int, int] | None = None

    @property
    def active(self) -> tuple[Symptom, ...]:
        return self._watch.active

    def observe(self, status: EngineStatus, steps: int) -> bool:
        """Returns whether the limit starts or ends."""
        last, now = self._last, (status.preemptions, steps)
        self._last = now
        if last is None:
            return False
        preemptions, new_steps = now[0] - last[0], now[1] - last[1]
        if not new_steps and (status.running or status.waiting):  # one long step
            return False
        rate = preemptions / new_steps if new_steps else 0.0
        was_active = bool(self.active)
        for symptom in self._watch.observe(Measurements(preemptions=rate if status.flags.enabled else 0.0)):
            logger.warning("%s", symptom)
        return bool(self.active) != was_active

    def limit(self, flags: SpeculationFlags) -> SpeculationFlags:
        if not self.active:
            return flags
        depth = LIMITED_DEPTH if flags.max_depth is None else min(LIMITED_DEPTH, flags.max_depth)
        return replace(flags, max_depth=depth)
