"""Recent figures of drafting with a pool, seen from a target: gain, cost, and symptoms."""

import logging
from collections.abc import Iterable

from paceline.cluster.cost.symptoms import Measurements, SymptomWatch
from paceline.core.status.engine import Symptom
from paceline.runtime.draft_pool.connection import DraftConnection
from paceline.runtime.wire.messages import MAX_DEPTH

logger = logging.getLogger(__name__)

MIN_TRIP_SHARE = 0.05
"""Share of a step above which the usual round trip makes it worth to receive drafts ahead."""
WINDOW = 16.0
"""Observations over which the moving averages extend."""
STALE_SECONDS = 10.0
"""Time without a step after which no symptom is reported."""
STEPS_PER_CHECK = 4
"""Steps between two checks for symptoms."""


class _MovingAverage:
    def __init__(self) -> None:
        self.value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) / WINDOW


class PoolStatistics:
    """Decides the depth to request, and whether to receive drafts ahead."""

    def __init__(self) -> None:
        self._step, self._gain, self._depth = _MovingAverage(), _MovingAverage(), _MovingAverage()
        self._watch = SymptomWatch()
        self._steps = 0
        self._last_step = 0.0

    @property
    def step_seconds(self) -> float | None:
        """Time of a target's step without drafts."""
        return self._step.value

    @property
    def gain(self) -> float:
        """Tokens that a draft adds to a sequence's step."""
        return self._gain.value or 1.0

    def symptoms(self, now: float) -> tuple[Symptom, ...]:
        """Current symptoms. Any thread may call it."""
        return self._watch.active if now - self._last_step < STALE_SECONDS else ()

    def observe_step(self, seconds: float) -> None:
        self._step.observe(seconds)

    def observe_round(self, offered: int, accepted: int) -> None:
        """A verified round that had a draft."""
        self._depth.observe(offered)
        self._gain.observe(accepted)

    def wants_branches(self, connection: DraftConnection) -> bool:
        """Whether the worker shall send drafts before they are requested."""
        trip, step = connection.round_trip.usual, self._step.value
        return trip is not None and step is not None and trip > MIN_TRIP_SHARE * step

    def max_depth(self, connection: DraftConnection) -> int:
        """Depth to request at most. A draft slower than the verification drafts what fits into a step."""
        seconds = connection.load.pass_us * 1e-6
        if not self._watch.has("slow_draft") or not seconds or self._step.value is None:
            return MAX_DEPTH
        return min(MAX_DEPTH, max(1, int(self._step.value / seconds)))

    def check(self, connections: Iterable[DraftConnection], now: float) -> None:
        """Log new symptoms. Call it once per step."""
        self._last_step = now
        self._steps += 1
        if self._steps % STEPS_PER_CHECK:
            return
        ready = [connection for connection in connections if connection.is_ready]
        passes = [connection.load.pass_us * 1e-6 for connection in ready if connection.load.pass_us]
        trips = [trip for connection in ready if (trip := connection.round_trip.seconds) is not None]
        depth = self._depth.value
        measurements = Measurements(
            accepted=self._gain.value,
            depth=depth,
            draft_seconds=min(passes) * depth if passes and depth else None,
            verify_seconds=self._step.value,
            round_trip=min(trips, default=None),
        )
        for symptom in self._watch.observe(measurements):
            logger.warning("%s", symptom)
