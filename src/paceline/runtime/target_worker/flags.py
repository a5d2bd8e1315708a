"""The gateway's flags of speculation on a target worker, limited while its cache is under pressure."""

import logging
from dataclasses import replace

from paceline.cluster.cost.symptoms import Measurements, SymptomWatch
from paceline.core.errors import PacelineError
from paceline.core.speculation import SpeculationFlags
from paceline.core.status.engine import EngineStatus, Symptom
from paceline.engine.loop import EngineLoop

logger = logging.getLogger(__name__)

PERSISTENCE = 3
"""Observations in a row, `PRESSURE_SECONDS` apart, that start or end the limit."""
LIMITED_DEPTH = 1
"""Greatest depth while sequences are preempted for lack of cache blocks, some of which hold drafts."""
PRESSURE_SECONDS = 1.0
"""Interval of the observations of `KvPressure`."""


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


logger = logging.getLogger(__name__)


class WorkerFlags:
    """Applies flags to the engine. The thread of the worker calls it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop, self._engine = loop, loop.engine
        self._flags, self._pressure = SpeculationFlags(), KvPressure()
        self._next_observation = 0.0

    @property
    def symptoms(self) -> tuple[Symptom, ...]:
        return tuple(self._pressure.active)

    def set(self, flags: SpeculationFlags) -> None:
        """Flags that the engine refuses are ignored with a warning."""
        try:
            self._engine.flags.validate(flags)
            self._flags = flags
            self._apply()
        except PacelineError as error:  # the gateway's configuration differs from this worker's
            logger.warning("the flags are ignored: %s", error)

    def observe(self, status: EngineStatus, now: float) -> bool:
        """Limit the flags by the pressure on the cache, once per `PRESSURE_SECONDS`. Returns whether it was time for that."""
        if now < self._next_observation:
            return False
        self._next_observation = now + PRESSURE_SECONDS
        if self._pressure.observe(status, self._engine.num_steps) and self._loop.is_running:
            self._apply()
        return True

    def _apply(self) -> None:
        flags = self._pressure.limit(self._flags)
        self._loop.call(lambda: self._engine.flags.apply(flags))
