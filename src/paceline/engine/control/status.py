"""The status of an engine, for reports."""

from typing import Protocol

from paceline.core.status.engine import AuditCounts, EngineStatus, TrafficStatus
from paceline.engine.control.run_time_flags import RunTimeFlags
from paceline.engine.executors.selector import ExecutorSelector
from paceline.engine.requests.committer import Committer
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator

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
