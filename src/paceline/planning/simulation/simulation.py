"""The simulation: requests of a trace, the production router, and simulated workers, on a virtual clock."""

import random
from heapq import heappop, heappush

from paceline.cluster.routing.kv_index import KvIndex
from paceline.cluster.routing.kv_router import KvRouter
from paceline.cluster.routing.router import Prompt, Router, WorkerLoad, make_router
from paceline.core.clock import VirtualClock
from paceline.core.kv_events import CacheEvent
from paceline.planning.simulation.batches import Batch, ClosedBatch, SteppedBatch
from paceline.planning.simulation.config import SimulationConfig
from paceline.planning.simulation.depths import PolicyDepths
from paceline.planning.simulation.job import Job
from paceline.planning.simulation.prefix_cache import PrefixCache
from paceline.planning.simulation.prompt_blocks import prefix_sums, prompt_blocks
from paceline.planning.simulation.result import SimulationResult
from paceline.planning.simulation.rounds import Rounds
from paceline.planning.simulation.worker import SimulatedWorker
from paceline.planning.traces.trace import BLOCK_TOKENS, Trace


def simulate(config: SimulationConfig, trace: Trace) -> SimulationResult:
    """Runs every request of the trace to its end. The same arguments give the same result."""
    return _Simulation(config, trace).run()


class _Simulation:
    def __init__(self, config: SimulationConfig, trace: Trace) -> None:
        self._config, self._trace = config, trace
        self._clock = VirtualClock()
        self._index = KvIndex(prefix_sums)
        kv_aware = config.router == "kv_aware"
        self._router: Router = KvRouter(self._index, self._clock) if kv_aware else make_router(config.router)
        self._unit = trace.block_tokens // BLOCK_TOKENS
        """Tokens that one id of a simulated prompt stands for."""
        self._names = [f"target-{i}" for i in range(config.workers)]
        self._number = {name: i for i, name in enumerate(self._names)}
        self._rounds = Rounds(config)
        self._workers = [self._worker(i) for i in range(config.workers)]
        self._assigned = [0] * config.workers
        self._loads = [self._load(i) for i in range(config.workers)]
        self._ends: list[tuple[float, int]] = []
        """(end of a segment, worker). A pair whose time is not the worker's `end` is obsolete."""
        self._jobs: list[Job] = []
        self._rejected = 0
        self._next = 0

    def run(self) -> SimulationResult:
        requests, streams = self._trace.requests, self._config.streams
        for _ in range(min(streams or 0, len(requests))):
            self._arrive(0.0)
        while True:
            arrival = requests[self._next].arrival if streams is None and self._next < len(requests) else None
            if self._ends and (arrival is None or self._ends[0][0] < arrival):
                self._end_segment(*heappop(self._ends))
            elif arrival is not None:
                self._arrive(arrival)
            else:
                break
        return self._result()

    def _arrive(self, now: float) -> None:
        self._set_time(now)
        request = self._trace.requests[self._next]
        job = Job(
            self._next,
            now,
            request.prompt_tokens,
            request.output_tokens,
            prompt_blocks(request, self._trace.block_tokens),
        )
        self._next += 1
        if not self._workers[0].fits(job):
            self._rejected += 1
            return
        self._jobs.append(job)
        number = self._number[self._router.choose(Prompt(job.prompt, request_id=str(job.id)), self._loads)]
        job.worker = number
        self._assigned[number] += 1
        worker = self._workers[number]
        before = worker.end
        worker.submit(job, now)
        self._loads[number] = self._load(number)
        if worker.end != before:
            self._schedule(number)

    def _end_segment(self, time: float, number: int) -> None:
        worker = self._workers[number]
        if worker.end != time:
            return
        self._set_time(time)
        started, ended = worker.finish_segment()
        self._schedule(number)
        for job in started:
            self._router.started(str(job.id), job.cached // self._unit)
        for job in ended:
            self._router.ended(str(job.id))
        if ended:
            self._assigned[number] -= len(ended)
        if started or ended:
            self._loads[number] = self._load(number)
        if self._config.streams is not None:
            for _ in ended:
                if self._next < len(self._trace.requests):
                    self._arrive(time)

    def _schedule(self, number: int) -> None:
        end = self._workers[number].end
        if end is not None:
            heappush(self._ends, (end, number))

    def _set_time(self, time: float) -> None:
        self._clock.advance(max(0.0, time - self._clock.now()))

    def _load(self, number: int) -> WorkerLoad:
        profile, worker = self._config.profile, self._workers[number]
        return WorkerLoad(
            self._names[number],
            self._assigned[number],
            int(profile.max_num_seqs.value),
            worker.kv_use,
            int(profile.kv_tokens.value) // self._unit,
        )

    def _worker(self, number: int) -> SimulatedWorker:
        config, name = self._config, self._names[number]

        def publish(event: CacheEvent) -> None:
            self._index.apply(name, event)

        cache = PrefixCache(int(config.profile.kv_tokens.value), self._trace.block_tokens, publish)
        speculation = config.speculation
        return SimulatedWorker(
            config.profile,
            self._rounds,
            self._batch(random.Random(f"{config.seed}/{number}")),
            cache,
            speculation.max_depth if speculation else 0,
            drafts_here=speculation is not None and not config.draft_workers,
        )

    def _batch(self, dice: random.Random) -> Batch:
        config, speculation = self._config, self._config.speculation
        if config.mode == "closed_form":
            return ClosedBatch(self._rounds, dice)
        if speculation is None:
            return SteppedBatch(self._rounds, dice)
        policy = PolicyDepths(config.profile, speculation.max_depth) if speculation.rule == "policy" else None
        return SteppedBatch(self._rounds, dice, policy)

    def _result(self) -> SimulationResult:
        return SimulationResult(
            config=self._config,
            trace=self._trace.name,
            jobs=tuple(self._jobs),
            rejected=self._rejected,
            seconds=max((job.finished for job in self._jobs), default=0.0),
            busy_seconds=tuple(worker.busy_seconds for worker in self._workers),
            steps=sum(worker.steps for worker in self._workers),
        )
