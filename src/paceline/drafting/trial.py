"""The drafts of a pool during a trial, the draft in use and the new draft, and the figures of drafting with the pool.

Each sequence is assigned at random to the current draft or to the new draft when it starts. The assignment holds while the
sequence decodes without drafts, so the tokens and seconds of a draft that does not pay are those of plain decoding, as they
would be after the trial. What is learned of one draft does not decide how the second draft is used.

`PoolStatistics` has recent figures as the target sees them: gain, cost, and symptoms.
"""

import logging
import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from paceline.core.status import Symptom
from paceline.drafting.connection import DraftConnection
from paceline.drafting.drafts import TreeSplit
from paceline.policy.cost.symptoms import Measurements, SymptomWatch
from paceline.policy.pairing.draft_trial import TRIAL_SHARE
from paceline.policy.pairing.pairing import Pairing
from paceline.wire.draft_messages import MAX_DEPTH

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


class TrialChange(Enum):
    """What a new list of draft workers means for a trial."""

    NONE = "none"
    BEGUN = "begun"
    KEPT = "kept"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True, eq=False)
class PoolDraft:
    """What a target knows of one draft."""

    pairing: Pairing = field(default_factory=Pairing)
    statistics: PoolStatistics = field(default_factory=PoolStatistics)
    split: TreeSplit = field(default_factory=TreeSplit)


class PoolDrafts:
    """The draft in use and the draft on trial, by the connections to their workers."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(32)
        self.current, self.candidate = PoolDraft(), PoolDraft()
        self._trial: frozenset[str] = frozenset()
        """Workers on trial."""

    def of(self, connection: DraftConnection) -> PoolDraft:
        return self.candidate if connection.where.is_on_trial else self.current

    def observe_step(self, seconds: float) -> None:
        """A step of the target took `seconds`, without drafts."""
        self.current.statistics.observe_step(seconds)
        if self._trial:
            self.candidate.statistics.observe_step(seconds)

    def check(self, connections: Iterable[DraftConnection], now: float) -> None:
        """Log new symptoms of the drafts. Call it once per step."""
        if not self._trial:
            self.current.statistics.check(connections, now)
            return
        connections = tuple(connections)
        for pool_draft in (self.current, self.candidate):
            pool_draft.statistics.check(
                [connection for connection in connections if self.of(connection) is pool_draft], now
            )

    def set_connections(self, connections: Iterable[DraftConnection]) -> TrialChange:
        """These are all connections now. A draft that is kept brings what is known of it."""
        connections = tuple(connections)
        addresses = [connection.where for connection in connections]
        before, self._trial = self._trial, frozenset(where.name for where in addresses if where.is_on_trial)
        if bool(before) == bool(self._trial):
            return TrialChange.NONE
        is_kept = any(where.name in before for where in addresses)
        if is_kept:
            self.current = self.candidate
        self.candidate = PoolDraft()
        if self._trial:
            return TrialChange.BEGUN
        return TrialChange.KEPT if is_kept else TrialChange.ROLLED_BACK

    def preferences(self, sequence_id: int) -> tuple[bool, bool]:
        """Whether to draft for a sequence with the draft on trial. The second value counts if the draft of the first has no
        worker."""
        is_trial = bool(self._trial) and self.draws_trial(sequence_id)
        return is_trial, not is_trial

    def draws_trial(self, sequence_id: int) -> bool:
        """Whether a sequence belongs to the share for the draft on trial. The answer is the same at every call."""
        return random.Random((self._seed << 64) ^ sequence_id).random() < TRIAL_SHARE

    def connection_for(self, sequence_id: int, connections: Iterable[DraftConnection]) -> DraftConnection | None:
        """A ready worker of the draft that a sequence belongs to. None if no worker is ready."""
        ready = [connection for connection in connections if connection.is_ready]
        for is_trial in self.preferences(sequence_id):
            for connection in ready:
                if connection.where.is_on_trial is is_trial:
                    return connection
        return None

    def is_on_trial(
        self, sequence_id: int, opened: DraftConnection | None, connections: Iterable[DraftConnection]
    ) -> bool:
        """Whether the draft on trial drafts for a sequence, which is open at the connection `opened`."""
        if not self._trial:
            return False
        connection = opened or self.connection_for(sequence_id, connections)
        return connection is not None and connection.where.is_on_trial
