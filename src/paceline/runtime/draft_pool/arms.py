"""The drafts of a pool during a trial: the draft in use and the new draft.

Each sequence is assigned at random to the current draft or to the new draft when it starts. The assignment holds while the
sequence decodes without drafts, so the tokens and seconds of a draft that does not pay are those of plain decoding, as they
would be after the trial. What is learned of one draft does not decide how the second draft is used.
"""

import random
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from paceline.cluster.pairing.draft_trial import TRIAL_SHARE
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
