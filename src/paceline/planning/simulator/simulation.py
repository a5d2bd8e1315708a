"""The simulation: requests of a trace on a simulated cluster, with faults and a controller of sizes, on a virtual clock."""

import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from itertools import count

from paceline.core.clock import VirtualClock
from paceline.planning import ROLES, Controller, Observation
from paceline.planning.simulator.cluster import SimulatedCluster, busy_by_role
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.prefix_cache import prompt_blocks
from paceline.planning.simulator.result import Objective, PoolSize, SimulationResult, WorkerUse
from paceline.planning.simulator.settings import AlphaDrift, Fault, SimulationConfig, SlowLinks, WorkersLost
from paceline.planning.simulator.texts import KINDS
from paceline.planning.traces import Trace


@dataclass(frozen=True, slots=True)
class Scaling:
    """A controller of pool sizes, and the objective whose misses it sees."""

    controller: Controller
    objective: Objective


def simulate(config: SimulationConfig, trace: Trace, scaling: Scaling | None = None) -> SimulationResult:
    """Runs every request of the trace to its end. The same arguments give the same result.

    The garbage collector is paused meanwhile: all requests stay in memory until the report, and it would visit each again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _Simulation(config, trace, scaling).run()
    finally:
        if was_enabled:
            gc.enable()


class _Simulation:
    def __init__(self, config: SimulationConfig, trace: Trace, scaling: Scaling | None) -> None:
        self._config, self._trace, self._scaling = config, trace, scaling
        self._clock = VirtualClock()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._cluster = SimulatedCluster(config, trace.block_tokens, self._clock, self._at)
        self._jobs: list[SimulatedRequest] = []
        self._rejected = self._next = 0
        self._num_kinds = KINDS if config.speculation is not None and config.speculation.spread else 1
        self._kinds = random.Random(f"{config.seed}/texts")
        """Draws the kind of each text, in the order of the trace."""
        self._num_started = self._num_ended = 0
        self._window = _Window()
        self._sizes: list[PoolSize] = []
        for fault in config.faults:
            self._plan_fault(fault)
        if scaling is not None:
            self._at(scaling.controller.interval, self._control)
        self._note_sizes()

    def run(self) -> SimulationResult:
        requests, streams, ramp = self._trace.requests, self._config.streams, self._config.ramp_seconds
        ends, timers, never = self._cluster.ends, self._timers, float("inf")
        members, count = self._cluster.members.all, len(requests)
        arrival, num_streams = 0.0 if streams else requests[0].arrival, 0
        while True:
            timer = timers[0][0] if timers else never
            if ends and (end := ends[0][0]) <= timer and end < arrival:
                time, number = heappop(ends)
                if members[number].worker.end == time:  # type: ignore[union-attr]
                    self._end_segment(time, number)
            elif arrival <= timer and arrival < never:
                if self._next < count:
                    self._arrive(arrival)
                num_streams += 1
                if self._next == count or num_streams == streams:
                    arrival = never
                else:
                    arrival = requests[self._next].arrival if streams is None else num_streams * ramp
            elif timer < never and self._num_ended < len(self._jobs) + (arrival < never):
                self._clock.advance_to(timer)
                heappop(timers)[2]()
            else:
                break
        return self._result()

    def _arrive(self, now: float) -> None:
        self._clock.advance_to(now)
        request = self._trace.requests[self._next]
        job = SimulatedRequest(
            self._next,
            now,
            request.prompt_tokens,
            request.output_tokens,
            prompt_blocks(request, self._trace.block_tokens),
            self._kinds.randrange(self._num_kinds) if self._num_kinds > 1 else 0,
        )
        self._next += 1
        if not self._cluster.fits(job):
            self._rejected += 1
            return
        self._jobs.append(job)
        self._window.arrivals += 1
        self._window.prompt_tokens += job.prompt_tokens
        self._cluster.route(job)

    def _end_segment(self, time: float, number: int) -> None:
        self._clock.advance_to(time)
        started, ended = self._cluster.end_segment(number)
        self._num_ended += len(ended)
        if self._scaling is not None:
            self._observe(time, started, ended)
        if ended and self._config.streams is not None:
            for _ in ended:
                if self._next < len(self._trace.requests):
                    self._arrive(time)

    def _at(self, time: float, action: Callable[[], None]) -> None:
        heappush(self._timers, (time, next(self._numbers), action))

    def _plan_fault(self, fault: Fault) -> None:
        cluster = self._cluster
        match fault:
            case WorkersLost():
                for name in fault.workers:
                    self._at(fault.start, partial(cluster.lose, name, fault.is_silent, fault.end))
            case SlowLinks():
                self._at(fault.start, lambda: cluster.set_conditions(cluster.alpha_factor, fault.factor))
                self._at(fault.end, lambda: cluster.set_conditions(cluster.alpha_factor, 1.0))
            case AlphaDrift():
                self._at(fault.start, lambda: cluster.set_conditions(fault.factor, cluster.link_factor))
                self._at(fault.end, lambda: cluster.set_conditions(1.0, cluster.link_factor))

    def _control(self) -> None:
        assert self._scaling is not None
        controller = self._scaling.controller
        for role, size in controller.decide(self._observation(controller.interval)).items():
            self._cluster.resize(role, size)
        self._note_sizes()
        self._window = _Window(busy=self._busy_now())
        self._at(self._clock.now() + controller.interval, self._control)

    def _observe(self, time: float, started: Sequence[SimulatedRequest], ended: Sequence[SimulatedRequest]) -> None:
        assert self._scaling is not None
        window, objective = self._window, self._scaling.objective
        for job in started:
            if job.first_token == time:
                self._num_started += 1
                window.started += 1
                window.started_tokens += job.prompt_tokens
                window.cached_tokens += job.cached
        for job in ended:
            window.finished += 1
            window.output_tokens += job.output_tokens
            window.missed += not objective.is_met(job.ttft, job.tpot)

    def _busy_now(self) -> float:
        members = self._cluster.members.of("target", "ready", "draining")
        return sum(self._cluster.busy_seconds(member) for member in members)

    def _observation(self, seconds: float) -> Observation:
        window, cluster = self._window, self._cluster
        pools = {role: cluster.members.pool(role) for role in ROLES}
        serving = pools["target"].ready + pools["target"].draining
        return Observation(
            time=self._clock.now(),
            seconds=seconds,
            arrivals=window.arrivals,
            prompt_tokens=window.prompt_tokens,
            cached_tokens=window.cached_tokens,
            started=window.started,
            started_tokens=window.started_tokens,
            finished=window.finished,
            output_tokens=window.output_tokens,
            missed=window.missed,
            waiting=len(self._jobs) - self._num_started,
            running=len(self._jobs) - self._num_ended,
            kv_use=cluster.kv_use,
            busy=max(0.0, self._busy_now() - window.busy) / (seconds * serving) if serving else 0.0,
            pools=pools,
        )

    def _note_sizes(self) -> None:
        pools = {role: self._cluster.members.pool(role) for role in ROLES}
        coming = {role: pools[role].ready_or_starting for role in ROLES}
        self._sizes.append(PoolSize(self._clock.now(), coming, pools["target"].ready))

    def _result(self) -> SimulationResult:
        cluster = self._cluster
        end = max((job.finished for job in self._jobs), default=0.0)
        members = cluster.members.all.values()
        busy = busy_by_role(cluster)
        return SimulationResult(
            config=self._config,
            trace=self._trace.name,
            jobs=tuple(self._jobs),
            rejected=self._rejected,
            seconds=end,
            workers=tuple(
                WorkerUse(member.name, member.role, member.seconds(end), cluster.busy_seconds(member))
                for member in members
                if member.since < end or not end
            ),
            busy_seconds=busy,
            paid_seconds={role: cluster.members.paid_seconds(role, end) for role in ROLES},
            steps=sum(
                member.worker.steps for member in members if member.worker is not None and member.role == "target"
            ),
            handoffs=cluster.handoffs.num_done if cluster.handoffs else 0,
            failed_handoffs=cluster.handoffs.num_failed if cluster.handoffs else 0,
            sizes=tuple(self._sizes),
        )


@dataclass(slots=True)
class _Window:
    """Counts since the last observation."""

    busy: float = 0.0
    """Busy seconds of the serving targets at its start."""
    arrivals: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    started: int = 0
    started_tokens: int = 0
    finished: int = 0
    output_tokens: int = 0
    missed: int = 0
