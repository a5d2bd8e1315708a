"""The gateway's flags of speculation on a target worker, limited while its cache is under pressure."""

import logging

from paceline.core.errors import PacelineError
from paceline.core.speculation import SpeculationFlags
from paceline.core.worker_status import EngineStatus, Symptom
from paceline.engine.loop import EngineLoop
from paceline.runtime.target_worker.kv_pressure import KvPressure

logger = logging.getLogger(__name__)

PRESSURE_SECONDS = 1.0
"""Interval of the observations of `KvPressure`."""


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
            self._engine.validate_flags(flags)
            self._flags = flags
            self._apply()
        except PacelineError as error:  # the gateway's configuration differs from this worker's
            logger.warning("the flags are ignored: %s", error)

    def observe(self, status: EngineStatus, now: float) -> bool:
        """Limit the flags by the pressure on the cache, once per `PRESSURE_SECONDS`; returns whether it was time for that."""
        if now < self._next_observation:
            return False
        self._next_observation = now + PRESSURE_SECONDS
        if self._pressure.observe(status, self._engine.num_steps) and self._loop.is_running:
            self._apply()
        return True

    def _apply(self) -> None:
        flags = self._pressure.limit(self._flags)
        self._loop.call(lambda: self._engine.set_flags(flags))
