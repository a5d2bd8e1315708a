"""The status of an engine for reports, and the speculation flags that change while it runs.

`StatusReporter` makes the status. `RunTimeFlags` holds the flags.
"""

from typing import Protocol

from paceline.core.request import SpeculationFlags
from paceline.core.sequence import Sequence
from paceline.core.status import AuditCounts, EngineStatus, TrafficStatus
from paceline.engine.commit import Committer
from paceline.engine.scheduler import Scheduler
from paceline.engine.selector import ExecutorSelector
from paceline.engine.speculator import Speculator
from paceline.requests import RequestValidator


class AssignedMethods(Protocol):
    """Chooses the method of requests that name none."""

    @property
    def default_method(self) -> str:
        """The method of a sequence that starts now."""
        ...

    def method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        ...


class RunTimeFlags:
    """The engine's thread changes them; any thread may read or check them."""

    def __init__(
        self,
        validator: RequestValidator,
        scheduler: Scheduler,
        speculator: Speculator,
        assignment: AssignedMethods | None,
    ) -> None:
        """`assignment` is None if requests that name no method get the validator's default."""
        self._validator, self._scheduler, self._speculator = validator, scheduler, speculator
        self._assignment = assignment

    @property
    def effective(self) -> SpeculationFlags:
        """What holds for a request that names nothing."""
        return SpeculationFlags(self._speculator.enabled, self._offered_method, self._validator.offered_depth)

    def validate(self, flags: SpeculationFlags) -> None:
        """Raise `InvalidRequest` if `apply` would."""
        self._validator.validate_flags(flags)

    def apply(self, flags: SpeculationFlags) -> None:
        """Change how to speculate from the next step on. Running sequences continue under the new flags."""
        self._validator.set_flags(flags)
        self._speculator.set_enabled(flags.enabled)
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            method = self._method_of(sequence)
            if method != sequence.method:
                self._speculator.set_method(sequence, method)
        self._speculator.prepare_next(self._scheduler.running)

    def _method_of(self, sequence: Sequence) -> str:
        """The method of a sequence under the present flags."""
        if self._assignment is not None:
            return self._assignment.method_of(sequence)
        return self._validator.method(sequence.speculation)

    @property
    def _offered_method(self) -> str:
        """The method of a request that names none."""
        if self._assignment is None or self._validator.flags.method is not None:
            return self._validator.offered_method
        return self._assignment.default_method


REPORT_SECONDS = 0.25
"""Longest age of the traffic report of a busy engine."""


class AuditReport(Protocol):
    """What the engine reports of its self-audit."""

    @property
    def counts(self) -> AuditCounts: ...


class StatusReporter:
    """The engine's thread calls `observe` after every step; any thread takes snapshots."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculator: Speculator,
        flags: RunTimeFlags,
        executors: ExecutorSelector,
        committer: Committer,
        audit: AuditReport | None,
    ) -> None:
        self._scheduler, self._speculator, self._flags = scheduler, speculator, flags
        self._executors, self._committer, self._audit = executors, committer, audit
        self._traffic: tuple[TrafficStatus, ...] = ()
        self._reported = 0.0

    def observe(self, now: float) -> None:
        """A step is committed: report its traffic now and then, and after the last one."""
        if now - self._reported >= REPORT_SECONDS or not self._scheduler.has_work:
            self._traffic, self._reported = self._speculator.traffic.report(), now

    def snapshot(self) -> EngineStatus:
        """Counts as of now; traffic as of the last report. Never blocks."""
        scheduler, speculator, pool = self._scheduler, self._speculator, self._scheduler.tables.pool
        return EngineStatus(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            kv_used=pool.num_blocks - pool.num_free,
            kv_total=pool.num_blocks,
            preemptions=scheduler.num_preemptions,
            invalid_drafts=speculator.num_invalid,
            flags=self._flags.effective,
            traffic=self._traffic,
            tiers=None if scheduler.tiers is None else scheduler.tiers.report(),
            advantage=speculator.depth.advantage if speculator.enabled else None,
            seconds=speculator.totals.seconds,
            executor_steps=dict(self._executors.counts),
            audit=AuditCounts(0, 0, 0) if self._audit is None else self._audit.counts,
            generated=self._committer.num_generated,
        )
