"""Messages of a draft worker to its targets: drafts, branches drafted ahead, its load, and errors."""

from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.drafting import branches as distributions
from paceline.drafting.branches import BranchKey, pack
from paceline.drafting.scheduler import DraftLimits, DraftPassTimes, DraftScheduler, TargetSession
from paceline.drafting.state import DraftedSequence
from paceline.wire.draft_messages import (
    MAX_NAME,
    Branches,
    Busy,
    Drafts,
    Error,
    ErrorCode,
    FromTarget,
    Load,
    RoundDraft,
    SequenceBranches,
)
from paceline.wire.transport import Listener, Peer

BUSY_MS = 250
ANNOUNCE_SECONDS = 0.002
"""Shortest drafting time for which branches are announced. A faster draft arrives before a target could decide to wait."""


class DraftSender:
    """Sends what the scheduler has ready. It decides nothing about the next pass."""

    def __init__(
        self,
        epoch: int,
        listener: Listener[FromTarget],
        scheduler: DraftScheduler,
        times: DraftPassTimes,
        limits: DraftLimits,
        clock: Clock,
    ) -> None:
        self._epoch, self._listener, self._scheduler = epoch, listener, scheduler
        self._times, self._limits, self._clock = times, limits, clock

    def answer_all(self) -> None:
        """Send every target the drafts of its rounds that are due."""
        for peer, target in self._scheduler.targets.items():
            self.answer(peer, target)

    def answer(self, peer: Peer, target: TargetSession) -> None:
        """Send the drafts of all rounds that are due, in one message."""
        self._scheduler.cut(target)
        drafts = []
        for sequence, state in target.sequences.items():
            if state.is_due:
                state.mark_answered()
                announces = target.wants_branches and target.is_ahead and self._announces(state)
                started = state.start_branches(self._scheduler.plan) if announces else ()
                alternatives = self._scheduler.alternatives(state)
                drafts.append(_round_draft(sequence, state, started, alternatives))
        if drafts:
            self._listener.send(peer, Drafts(self._epoch, drafts, self.load(target)))
            target.answered_at = self._clock.now()

    def send_branches(self) -> None:
        """Send the branches drafted ahead to the targets that want them before they ask."""
        for peer, target in self._scheduler.targets.items():
            if not target.wants_branches or not target.is_ahead:
                continue
            records: list[SequenceBranches] = []
            for sequence, state in target.sequences.items():
                unsent = state.unsent_branches(self._announces(state))
                branches = [(key, [node.token for node in drafted]) for key, drafted in unsent]
                records += pack(sequence, state.round, branches)
            if records:
                self._listener.send(peer, Branches(self._epoch, records))

    def busy(self, peer: Peer, target: TargetSession | None = None, sequences: Iterable[int] = ()) -> None:
        """There is no room for these sequences, or (without a session) for the target."""
        self._listener.send(peer, Busy(self._epoch, list(sequences), BUSY_MS, self.load(target)))

    def error(self, peer: Peer, code: ErrorCode, text: str, sequences: Iterable[int] = ()) -> None:
        self._listener.send(peer, Error(code, text[:MAX_NAME], list(sequences)))

    def load(self, target: TargetSession | None = None) -> Load:
        """Load of the worker, as reported to `target`."""
        return self._scheduler.load(self._times.average, target)

    def _announces(self, state: DraftedSequence) -> bool:
        return self._limits.max_branch_tokens > 0 and self._times.average * state.depth >= ANNOUNCE_SECONDS


def _round_draft(
    sequence: int, state: DraftedSequence, started: Iterable[BranchKey], alternatives: Iterable[BranchKey]
) -> RoundDraft:
    draft, data = state.draft, b""
    if state.params.needs_distribution:
        data = distributions.encode([node.distribution for node in draft if node.distribution is not None])
    tokens = [node.token for node in draft]
    return RoundDraft(sequence, state.round, tokens, data, state.was_ready, _flat(started), _flat(alternatives))


def _flat(keys: Iterable[BranchKey]) -> list[int]:
    return [part for key in keys for part in key]
