"""The drafts of a pool while one of them is on trial: the one in use, and the new one.

Every sequence belongs to one of both from its first step on, at random, also while it drafts nothing. So the tokens and seconds
of a draft that does not pay are those of plain decoding, as they would be after the trial. What is learned of one draft
does not decide how the other is used.
"""

import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from paceline.cluster.pairing.draft_trial import TRIAL_LABEL, TRIAL_SHARE
from paceline.cluster.pairing.pairing import Pairing
from paceline.runtime.draft_pool.connection import DraftConnection
from paceline.runtime.draft_pool.statistics import PoolStatistics
from paceline.runtime.draft_pool.tree_split import TreeSplit


class TrialChange(Enum):
    """What a new list of draft workers means for a trial."""

    NONE = "none"
    BEGUN = "begun"
    KEPT = "kept"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True, slots=True, eq=False)
class DraftArm:
    """What a target knows of one draft."""

    pairing: Pairing = field(default_factory=Pairing)
    statistics: PoolStatistics = field(default_factory=PoolStatistics)
    split: TreeSplit = field(default_factory=TreeSplit)


class DraftArms:
    """The draft in use and the one on trial, by the connections to their workers."""

    def __init__(self) -> None:
        self._seed = secrets.randbits(32)
        self.current, self.candidate = DraftArm(), DraftArm()
        self._trial: frozenset[str] = frozenset()
        """Workers on trial."""

    def of(self, connection: DraftConnection) -> DraftArm:
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
        for arm in (self.current, self.candidate):
            arm.statistics.check([one for one in connections if self.of(one) is arm], now)

    def set_connections(self, connections: Iterable[DraftConnection]) -> TrialChange:
        """These are all connections now. A draft that is kept brings what is known of it."""
        connections = tuple(connections)
        before, self._trial = self._trial, frozenset(one.where.name for one in connections if one.where.is_on_trial)
        if bool(before) == bool(self._trial):
            return TrialChange.NONE
        is_kept = any(one.where.name in before for one in connections)
        if is_kept:
            self.current = self.candidate
        self.candidate = DraftArm()
        if self._trial:
            return TrialChange.BEGUN
        return TrialChange.KEPT if is_kept else TrialChange.ROLLED_BACK

    def preferences(self, sequence_id: int) -> tuple[bool, bool]:
        """Whether to draft for a sequence with the draft on trial; second: if the first has no worker."""
        is_trial = bool(self._trial) and self.draws_trial(sequence_id)
        return is_trial, not is_trial

    def draws_trial(self, sequence_id: int) -> bool:
        """Whether a sequence is one of the share for the draft on trial: the same answer every time."""
        return random.Random((self._seed << 64) ^ sequence_id).random() < TRIAL_SHARE

    def connection_for(self, sequence_id: int, connections: Iterable[DraftConnection]) -> DraftConnection | None:
        """A ready worker of the draft that a sequence belongs to; None: no worker is ready."""
        ready = [one for one in connections if one.is_ready]
        for is_trial in self.preferences(sequence_id):
            for one in ready:
                if one.where.is_on_trial is is_trial:
                    return one
        return None

    def label(self, sequence_id: int, opened: DraftConnection | None, connections: Iterable[DraftConnection]) -> str:
        """End of the traffic class of a sequence. `opened`: where it is open."""
        if not self._trial:
            return ""
        connection = opened or self.connection_for(sequence_id, connections)
        return TRIAL_LABEL if connection is not None and connection.where.is_on_trial else ""
