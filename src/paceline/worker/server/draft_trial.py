"""The trial of a new draft inside one engine: a switchback in time.

An engine has one draft in use at a time, for all sequences of its batch. So the trial alternates between the two drafts in
periods of a few seconds, in pairs of random order. Load that changes slowly or regularly then meets each draft equally.

The unit of the test is a period, and not a sequence: sequences of one batch share their steps, so their speeds are not
independent observations. A period counts the tokens and the time of steps of the sequences that began in it, up to their end or
its own. A sequence from an earlier period does not count: the draft's cache of its prompt was computed with the weights of the
second draft. Cutting at the end of a period favours neither draft; counting only finished sequences would favour the short
ones.

Acceptance is learned apart for each draft, in traffic classes of its own, so that the depth rule uses each draft as well
as it can. A draft that the rule does not use, because it does not pay, counts as the plain decoding that it is.
"""

import random
from dataclasses import dataclass, field
from enum import IntEnum

from paceline.core.clock import Clock, WallClock
from paceline.core.sequence import Sequence
from paceline.core.status import DraftCounts, GoodputSums
from paceline.engine import EngineParts, Speculator, StepHook
from paceline.engine.step.step import Schedule, StepResult
from paceline.models.drafts import AnyDraft
from paceline.policy.pairing.draft_trial import USED_AT_ONCE, DraftTrial, TrialDecision, TrialLimits, TrialVerdict
from paceline.requests import Grammar
from paceline.speculation import DraftWeights

MIN_PERIODS = 8
"""Periods of each draft before the first test."""


class Version(IntEnum):
    CURRENT = 0
    CANDIDATE = 1


@dataclass(slots=True)
class _Measured:
    """What one draft was measured on."""

    sums: GoodputSums = field(default_factory=GoodputSums)
    """Sums over periods."""
    sequences: int = 0

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(self.sequences, self.sums.sequences, self.sums.goodput)


@dataclass(slots=True)
class _Period:
    """The period that runs now."""

    end: float
    waiting: set[int] = field(default_factory=set)
    """Sequences that were added and have not begun."""
    begun: set[int] = field(default_factory=set)
    measured: set[int] = field(default_factory=set)
    """Sequences that decoded in this period after they began in it."""
    tokens: int = 0
    seconds: float = 0.0
    """Sum over sequences of the time of their steps."""


class AlternatingDraftTrial(StepHook):
    """Tries a second draft on the traffic of the engine. Other threads may read `decision`, `counts` and `is_running`."""

    def __init__(self, clock: Clock | None = None, seed: int | None = None) -> None:
        """`seed` decides the order of the periods."""
        self._clock = clock or WallClock()
        self._random = random.Random(seed)
        self._speculator: Speculator | None = None
        self._methods: tuple[str, ...] = ()
        self.weights: DraftWeights | None = None
        """Weights of the engine's draft. None if the engine drafts without a model of its own."""
        self.decision = TrialDecision(TrialVerdict.CONTINUE, None, "")
        """The decision so far, or that of the last trial."""
        self._trial: DraftTrial | None = None
        self._period_seconds, self._deadline = 0.0, 0.0
        self._period = _Period(0.0)
        self._order: list[Version] = []
        self._version = Version.CURRENT
        self._measured = (_Measured(), _Measured())
        self._step_began, self._num_counted = 0.0, 0

    @property
    def is_running(self) -> bool:
        return self._trial is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the time of the trial has passed. An engine without requests does not notice: call `expire`."""
        return self.is_running and self._clock.now() >= self._deadline

    @property
    def method(self) -> str:
        return self._methods[0] if self._methods else ""

    @property
    def counts(self) -> tuple[DraftCounts, DraftCounts]:
        """What the draft in use before the trial and the new draft were measured on."""
        return self._measured[0].counts, self._measured[1].counts

    def attach(self, engine: EngineParts) -> None:
        self._speculator = engine.speculator
        proposers = engine.speculator.proposers
        weights = (proposer.traits.weights for proposer in proposers.values())
        self.weights = next((found for found in weights if found is not None), None)
        if self.weights is not None:
            self._methods = tuple(
                name for name, proposer in proposers.items() if proposer.traits.weights is self.weights
            )

    def begin(self, candidate: AnyDraft, seconds: float, period: float) -> None:
        """Start a trial; with 0 seconds the candidate is used at once. Raises `IncompatibleDraft` if the weights do not fit."""
        assert self.weights is not None
        assert self._speculator is not None
        assert self._trial is None
        self.weights.set_spare(candidate)
        now = self._clock.now()
        limits = TrialLimits(seconds=seconds, min_sequences=MIN_PERIODS, unit="periods")
        self._trial, self._deadline = DraftTrial(now, limits), now + seconds
        self._period_seconds, self._period = period, _Period(now + period)
        self._measured, self._order = (_Measured(), _Measured()), []
        self.decision = TrialDecision(TrialVerdict.CONTINUE, None, "the trial has begun")
        self._speculator.forget_trial(self._methods)
        if seconds:
            self._use(self._next_version())
        else:
            self._finish(USED_AT_ONCE)

    def stop(self, reason: str) -> None:
        """End the trial without a test: the draft before it stays."""
        if self._trial is not None:
            self._finish(TrialDecision(TrialVerdict.ROLL_BACK, self.decision.gain, reason))

    def expire(self) -> None:
        """Decide now if the time of the trial has passed."""
        if self.is_overdue:
            self._end_period(self._clock.now())

    def sequence_added(self, sequence: Sequence, grammar: Grammar | None) -> None:
        if self._trial is not None and sequence.speculation.enabled:
            self._period.waiting.add(sequence.id)

    def sequence_finished(self, sequence: Sequence) -> None:
        self._period.waiting.discard(sequence.id)  # its last step is still to be counted

    def before_step(self) -> None:
        if self._trial is None:
            return
        self._step_began, self._num_counted = self._clock.now(), 0
        if self._step_began >= self._period.end:
            self._end_period(self._step_began)

    def scheduled(self, schedule: Schedule) -> None:
        period = self._period
        if period.waiting:
            begun = {item.sequence.id: item.sequence.method for item in schedule.items}
            period.begun |= {sequence for sequence in period.waiting if begun.get(sequence) in self._methods}
            period.waiting.difference_update(begun)

    def committed(self, result: StepResult) -> None:
        period = self._period
        if self._trial is None or not period.begun:
            return
        for row in result.sequences:
            if row.verdict is not None and row.num_tokens == 1 and row.sequence.id in period.begun:
                period.tokens += len(row.verdict.path) + 1
                period.measured.add(row.sequence.id)
                self._num_counted += 1

    def after_step(self) -> None:
        if self._trial is not None and self._num_counted:
            self._period.seconds += self._num_counted * (self._clock.now() - self._step_began)
            self._num_counted = 0

    def close(self) -> None:
        self.stop("the engine was closed")

    def _end_period(self, now: float) -> None:
        """Count the period, decide, and begin the next period."""
        assert self._trial is not None
        period, measured = self._period, self._measured[self._version]
        if period.seconds:
            measured.sums = measured.sums.with_sequence(period.tokens, period.seconds)
            measured.sequences += len(period.measured)
        current, candidate = self._measured
        decision = self._trial.decide(current.sums, candidate.sums, now)
        if decision.verdict is TrialVerdict.CONTINUE:
            self.decision = decision
            self._period = _Period(now + self._period_seconds, period.waiting)
            self._use(self._next_version())
        else:
            self._finish(decision)

    def _finish(self, decision: TrialDecision) -> None:
        assert self.weights is not None
        assert self._speculator is not None
        is_kept = decision.verdict is TrialVerdict.KEEP
        self._use(Version.CANDIDATE if is_kept else Version.CURRENT)
        self._version = Version.CURRENT  # The draft in use is the current draft of the next trial
        self._speculator.set_trial(self._methods, False)
        if is_kept and self._measured[Version.CANDIDATE].sequences:
            self._speculator.adopt_trial(self._methods)
        self.weights.drop_spare()
        self._period = _Period(0.0)
        self.decision = decision
        self._trial = None

    def _next_version(self) -> Version:
        if not self._order:
            self._order = self._random.sample(list(Version), len(Version))
        return self._order.pop()

    def _use(self, version: Version) -> None:
        assert self.weights is not None
        assert self._speculator is not None
        if version is not self._version:
            self.weights.exchange()
            self._version = version
        self._speculator.set_trial(self._methods, version is Version.CANDIDATE)
