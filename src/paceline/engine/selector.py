"""Chooses the executor of every step and counts why."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.clock import Clock
from paceline.engine.hook import StepHooks
from paceline.engine.host import HostExecutor
from paceline.engine.scheduler import Scheduler
from paceline.engine.speculator import Speculator
from paceline.engine.step.step import GRAPH, GraphStepExecutor, HostReason, Schedule, StepExecutor

FETCH_SECONDS = 0.005
"""Longest wait for blocks from lower tiers when no sequence can run; a new request may arrive meanwhile."""


class ExecutorSelector:
    """The graph executor takes every step that it can. The host executor takes the remaining steps."""

    def __init__(
        self,
        host: HostExecutor,
        graph: GraphStepExecutor | None,
        scheduler: Scheduler,
        speculator: Speculator,
        hooks: StepHooks,
        clock: Clock,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Steps by executor: `graph`, or the `HostReason` why the host executor took it."""
        self._host, self._graph = host, graph
        self._scheduler, self._speculator = scheduler, speculator
        self._hooks, self._clock = hooks, clock
        self._is_host_only = False

    def schedule(self) -> tuple[StepExecutor, Schedule | None]:
        """The executor of the next step, and what it computes. The schedule is None if there is nothing to submit.

        Before the host executor takes a step, the step in flight is collected.
        """
        reason = HostReason.NO_GRAPHS
        if self._graph is not None and not self._is_host_only:
            planned = self._graph.schedule(can_prefill=not any(hook.needs_host_prefill for hook in self._hooks))
            if planned is None:
                return self._graph, None
            if not isinstance(planned, HostReason):
                self.counts[GRAPH] += 1
                if planned.items:
                    self._start(planned)
                return self._graph, planned
            if self._graph.num_inflight:
                self._graph.drain()
                return self._graph, None
            if self._graph.is_loaded:
                self._graph.sync_to_host()
            self._graph.yield_to_host()
            reason = planned
        return self._host, self._schedule_on_host(reason)

    @contextmanager
    def host_only(self) -> Iterator[None]:
        """Give up the graph steps in flight, of which nothing is committed, and use the host until the context ends."""
        if self._graph is not None:
            self._graph.release()
            for sequence in self._scheduler.running:
                self._scheduler.tables.shrink(sequence.id, sequence.num_computed)
            self._speculator.forget(self._scheduler.running)
        self._is_host_only = True
        try:
            yield
        finally:
            self._is_host_only = False

    def _schedule_on_host(self, reason: HostReason) -> Schedule | None:
        schedule = self._scheduler.schedule()
        self._speculator.forget(schedule.preempted)
        if not schedule.items:
            if self._scheduler.tiers is not None:
                self._scheduler.tiers.wait(FETCH_SECONDS)
            return None
        self.counts[reason] += 1
        self._start(schedule)
        return schedule

    def _start(self, schedule: Schedule) -> None:
        """Note when its sequences run for the first time, and inform the hooks."""
        now = self._clock.now()
        for item in schedule.items:
            if item.sequence.started is None:
                item.sequence.started = now
        for hook in self._hooks:
            hook.scheduled(schedule)
