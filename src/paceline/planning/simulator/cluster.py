"""A simulated cluster: workers by role behind the production router, with hand-off and draft pools.

`Members` holds the workers and the time that they are paid for. `WorkerFactory` makes them: each gets a batch, a prefix cache
and a draft device.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappush
from typing import Literal

from paceline.core.clock import VirtualClock
from paceline.core.cluster_config import HealthConfig
from paceline.core.kv_events import CacheEvent
from paceline.core.pool_config import Role
from paceline.planning import ROLES, PoolState
from paceline.planning.simulator.batches import Batch, ClosedBatch, SteppedBatch
from paceline.planning.simulator.depths import PolicyDepths
from paceline.planning.simulator.draft_pool import DraftWorkers, PooledDrafts
from paceline.planning.simulator.handoffs import SimulatedHandoffs
from paceline.planning.simulator.job import SimulatedRequest
from paceline.planning.simulator.prefix_cache import NO_PROMPT, PrefixCache, prefix_sums
from paceline.planning.simulator.rounds import Rounds
from paceline.planning.simulator.settings import SimulationConfig
from paceline.planning.simulator.worker import DeviceDrafts, Drafting, NoDrafts, SimulatedWorker
from paceline.planning.traces import BLOCK_TOKENS
from paceline.policy.health import Backoff
from paceline.policy.routing.kv_index import KvIndex
from paceline.policy.routing.kv_router import KvRouter
from paceline.policy.routing.router import RoutedPrompt, Router, WorkerLoad, WorkerTable, make_router

MemberState = Literal["starting", "ready", "draining", "lost", "gone"]


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One worker. A draft worker has no `worker`, since `DraftWorkers` holds its sequences."""

    id: int
    name: str
    role: Role
    since: float
    """Time at which it was requested."""
    state: MemberState
    worker: SimulatedWorker | None = None
    drafts: PooledDrafts | None = None
    assigned: int = 0
    """Unfinished requests."""
    until: float | None = None
    """Time at which it left."""
    restarts: int = 0

    def seconds(self, now: float) -> float:
        """Time that it is paid for."""
        return (now if self.until is None else self.until) - self.since


@dataclass(slots=True)
class Members:
    """All workers that ever were, by id."""

    all: dict[int, SimulatedMember] = field(default_factory=dict)
    by_name: dict[str, SimulatedMember] = field(default_factory=dict)
    _counts: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 0))

    def add(self, role: Role, now: float, state: MemberState) -> SimulatedMember:
        number = self._counts[role]
        self._counts[role] += 1
        member = SimulatedMember(len(self.all), f"{role}-{number}", role, now, state)
        self.all[member.id] = self.by_name[member.name] = member
        return member

    def of(self, role: Role, *states: MemberState) -> list[SimulatedMember]:
        return [member for member in self.all.values() if member.role == role and member.state in states]

    def pool(self, role: Role) -> PoolState:
        counted = {state: len(self.of(role, state)) for state in ("ready", "starting", "draining")}
        return PoolState(counted["ready"], counted["starting"], counted["draining"])

    def paid_seconds(self, role: Role, now: float) -> float:
        return sum(member.seconds(now) for member in self.all.values() if member.role == role)


class WorkerFactory:
    """All workers share the rounds. The caches of target workers publish to the index."""

    def __init__(
        self, config: SimulationConfig, block_tokens: int, rounds: Rounds, index: KvIndex, drafters: DraftWorkers | None
    ) -> None:
        """`drafters` are the draft workers of all targets. If None, targets draft on their own devices, or not at all."""
        self._config, self._block_tokens, self._rounds = config, block_tokens, rounds
        self._index, self._drafters = index, drafters

    def equip(self, member: SimulatedMember) -> None:
        """Give a target or prefill worker its `worker`, and a target that uses draft workers its `drafts`."""
        profile, speculation = self._config.profile, self._config.speculation
        is_target = member.role == "target"

        member.worker = SimulatedWorker(
            profile,
            self._rounds,
            self._batch(random.Random(f"{self._config.seed}/{member.name}")),
            PrefixCache(
                int(profile.kv_tokens.value),
                self._block_tokens,
                partial(self._index.apply, member.name) if is_target else _ignore,
            ),
            speculation.max_depth if speculation and is_target else 0,
            self._drafting(member) if is_target else NoDrafts(),
        )

    def _drafting(self, member: SimulatedMember) -> Drafting:
        speculation = self._config.speculation
        if self._drafters is not None:
            number = int(member.name.removeprefix("target-"))
            member.drafts = PooledDrafts(self._drafters, number)
            return member.drafts
        if speculation is not None and speculation.alphas[0] > 0.0:
            return DeviceDrafts(self._config.profile, speculation.rule == "policy")
        return NoDrafts()

    def _batch(self, dice: random.Random) -> Batch:
        config, speculation = self._config, self._config.speculation
        if config.mode == "closed_form":
            return ClosedBatch(self._rounds, dice)
        if speculation is None or speculation.rule != "policy":
            return SteppedBatch(self._rounds, dice)
        policy = PolicyDepths(config.profile, speculation.max_depth, on_device=self._drafters is None)
        return SteppedBatch(self._rounds, dice, policy)


def _ignore(event: CacheEvent) -> None:
    pass


Timer = Callable[[float, Callable[[], None]], None]
"""Calls a function at a time."""
HEALTH = HealthConfig()


class SimulatedCluster:
    """`ends` holds (end of a segment, worker id). A pair whose time is not the worker's `end` is obsolete."""

    def __init__(self, config: SimulationConfig, block_tokens: int, clock: VirtualClock, at: Timer) -> None:
        self._config, self._clock, self._at = config, clock, at
        self._unit = block_tokens // BLOCK_TOKENS
        """Tokens that one id of a simulated prompt stands for."""
        self._index = KvIndex(prefix_sums)
        kv_aware = config.router == "kv_aware"
        self._router: Router = KvRouter(self._index, clock) if kv_aware else make_router(config.router)
        self._uses_caches = kv_aware
        """`KvRouter` uses the index, and no shares of KV caches in use."""
        profile = config.profile
        self._drafters = DraftWorkers(profile) if config.draft_workers else None
        network = profile.round_trip_seconds.value if self._drafters else 0.0
        self._rounds = Rounds(profile, config.speculation, network)
        self._factory = WorkerFactory(config, block_tokens, self._rounds, self._index, self._drafters)
        self.handoffs = SimulatedHandoffs(profile, clock, config.link) if config.prefill_workers else None
        self._max_num_seqs, self._kv_tokens = int(profile.max_num_seqs.value), int(profile.kv_tokens.value)
        self.members = Members()
        self.ends: list[tuple[float, int]] = []
        self._loads = WorkerTable()
        """Loads of the target workers that the router knows."""
        self._unrouted: list[SimulatedRequest] = []
        """Requests that arrived while no target was ready."""
        self._stranded: dict[int, list[SimulatedRequest]] = {}
        """Requests at a lost worker, until the gateway notices the loss."""
        self._measures: dict[int, Callable[[], None]] = {}
        self.alpha_factor = self.link_factor = 1.0
        for role in ("draft", "prefill", "target"):
            for _ in range(config.count(role)):
                self._become_ready(self.members.add(role, 0.0, "starting"))

    @property
    def kv_use(self) -> float:
        used = [member.worker.kv_use for member in self.members.of("target", "ready") if member.worker is not None]
        return sum(used) / len(used) if used else 0.0

    def busy_seconds(self, member: SimulatedMember) -> float:
        if member.worker is not None:
            return member.worker.busy_seconds
        return self._drafters.busy_seconds[member.id] if self._drafters else 0.0

    def fits(self, job: SimulatedRequest) -> bool:
        need = job.length + job.left + (self._config.speculation.max_depth if self._config.speculation else 0)
        return need <= self._kv_tokens

    def route(self, job: SimulatedRequest) -> None:
        """Choose a target worker for the request, and submit it there or to a prefill worker first."""
        if not self._loads:
            self._unrouted.append(job)
            return
        name = self._router.choose(RoutedPrompt(job.prompt, request_id=str(job.id)), self._loads)
        member = self.members.by_name[name]
        job.worker = member.id
        member.assigned += 1
        if member.state == "lost":
            self._stranded[member.id].append(job)
            self._update_load(member)
            return
        assert member.worker is not None
        prompt = self.handoffs.choose(job, member.worker) if self.handoffs is not None else None
        if prompt is None:
            self._submit(member, job)
            return
        self._update_load(member)
        self._submit(self.members.all[prompt.worker], prompt.part)
        self._at(prompt.deadline, lambda: self._fall_back(job.id))

    def end_segment(self, number: int) -> tuple[Sequence[SimulatedRequest], Sequence[SimulatedRequest]]:
        """The requests that got their first token, and those that ended, at a segment's end."""
        member = self.members.all[number]
        worker = member.worker
        assert worker is not None
        started, ended = worker.finish_segment()
        if worker.end is not None:
            heappush(self.ends, (worker.end, number))
        if member.role == "prefill":
            for part in ended:
                self._send(part)
            self._leave_if_drained(member)
            return (), ()
        if started:
            for job in started:
                self._router.started(str(job.id), job.cached // self._unit)
                if self._measures and (measure := self._measures.pop(job.id, None)) is not None:
                    measure()
        if ended:
            for job in ended:
                self._router.ended(str(job.id))
                job.prompt = NO_PROMPT  # millions of finished requests would keep their blocks
            member.assigned -= len(ended)
            self._leave_if_drained(member)
        if ended or (started and not self._uses_caches):
            self._update_load(member)
        return started, ended

    def resize(self, role: Role, count: int) -> None:
        """Start workers, or drain those with the fewest requests, until `count` serve or start."""
        serving = self.members.of(role, "ready", "starting")
        surplus = len(serving) - count
        for _ in range(-surplus):
            draining = self.members.of(role, "draining")
            if draining:
                self._become_ready(max(draining, key=lambda member: member.assigned))
                continue
            member = self.members.add(role, self._clock.now(), "starting")
            ready = member.since + self._config.profile.start_seconds.value
            self._at(ready, partial(self._become_ready, member))
        if surplus > 0:
            leaving = sorted(serving, key=lambda member: (member.state == "ready", member.assigned, -member.id))
            for member in leaving[:surplus]:
                self._drain(member)

    def lose(self, name: str, is_silent: bool, end: float | None) -> None:
        """A worker stops with all that it holds; it is ready again at `end`, or after a restart."""
        member, now = self.members.by_name[name], self._clock.now()
        if member.state not in ("ready", "draining", "starting"):
            return
        was_ready = member.state != "starting"
        member.state = "lost"
        member.restarts += 1
        delay = HEALTH.heartbeat * HEALTH.misses if is_silent else 0.0
        if was_ready:
            self._stop(member, delay)
        rule = Backoff()
        seconds = [rule.delay(uptime=0.0) for _ in range(member.restarts)][
            -1
        ] + self._config.profile.start_seconds.value
        self._at(now + delay + seconds if end is None else end, lambda: self._restart(member))

    def set_conditions(self, alpha_factor: float, link_factor: float) -> None:
        """Acceptance and link times from now on, relative to the usual ones."""
        self.alpha_factor, self.link_factor = alpha_factor, link_factor
        self._rounds.set_conditions(alpha_factor, link_factor)
        if self.handoffs is not None:
            self.handoffs.network_factor = link_factor
        if self._drafters is not None:
            self._drafters.network_factor = link_factor
        for member in self.members.of("target", "ready", "draining"):
            self._reconsider(member)

    def _submit(self, member: SimulatedMember, job: SimulatedRequest) -> None:
        worker, now = member.worker, self._clock.now()
        assert worker is not None
        if self.handoffs is not None and member.role == "target" and not job.received and not job.moves:
            self._measures[job.id] = self.handoffs.measure_local(job, worker.queued_tokens, now)
        before = worker.end
        worker.submit(job, now)
        if member.role == "target":
            self._update_load(member)
        if worker.end != before and worker.end is not None:
            heappush(self.ends, (worker.end, member.id))

    def _send(self, part: SimulatedRequest) -> None:
        assert self.handoffs is not None
        arrival = self.handoffs.sent(part.id)
        if arrival is not None:
            self._at(arrival, lambda: self._receive(part.id))

    def _receive(self, job_id: int) -> None:
        assert self.handoffs is not None
        job = self.handoffs.finish(job_id)
        if job is not None:
            self._submit(self.members.all[job.worker], job)

    def _fall_back(self, job_id: int) -> None:
        """The target computes a prompt whose hand-off failed or is late."""
        assert self.handoffs is not None
        job = self.handoffs.fail(job_id)
        if job is not None:
            self._submit(self.members.all[job.worker], job)

    def _stop(self, member: SimulatedMember, delay: float) -> None:
        now = self._clock.now()
        if member.role == "draft":
            assert self._drafters is not None
            self._undraft(self._drafters.remove(member.id), delay)
        elif member.role == "prefill":
            assert self.handoffs is not None
            assert member.worker is not None
            member.worker.stop(now)
            self.handoffs.workers.pop(member.id, None)
            if not delay:
                for job_id in self.handoffs.of_worker(member.id):
                    self._fall_back(job_id)
        else:
            assert member.worker is not None
            moved = member.worker.stop(now)
            if self.handoffs is not None:
                remote = self.handoffs.of_target(member.id)
                for job in remote:
                    job.move(0)
                moved += remote
            self._stranded[member.id] = moved
            self._at(now + delay, lambda: self._notice(member))

    def _notice(self, member: SimulatedMember) -> None:
        """The gateway continues the requests of a lost worker elsewhere."""
        jobs = self._stranded.pop(member.id, None)
        if jobs is None:
            return
        self._loads.remove(member.name)
        member.assigned = 0
        for job in jobs:
            self._router.ended(str(job.id))
            self._measures.pop(job.id, None)
            if job.worker >= 0:  # it was sent there after the loss
                job.move(0)
            self.route(job)

    def _restart(self, member: SimulatedMember) -> None:
        if member.state == "lost":
            if member.role == "target":
                self._notice(member)
            self._become_ready(member)

    def _become_ready(self, member: SimulatedMember) -> None:
        if member.state == "gone":
            return
        member.state = "ready"
        if member.role == "draft":
            assert self._drafters is not None
            self._drafters.add(member.id)
            self._reopen()
            return
        if member.worker is None:
            self._factory.equip(member)
        if member.role == "prefill":
            assert self.handoffs is not None
            assert member.worker is not None
            self.handoffs.workers[member.id] = member.worker
            return
        if not self._loads.has(member.name):
            self._loads.set(self._load(member))
        waiting, self._unrouted = self._unrouted, []
        for job in waiting:
            self.route(job)

    def _drain(self, member: SimulatedMember) -> None:
        if member.state == "starting":
            self._leave(member)
            return
        member.state = "draining"
        if member.role == "draft":
            assert self._drafters is not None
            self._undraft(self._drafters.remove(member.id), 0.0)
            self._leave(member)
        elif member.role == "prefill":
            assert self.handoffs is not None
            self.handoffs.workers.pop(member.id, None)
        else:
            self._loads.remove(member.name)
        self._leave_if_drained(member)

    def _leave_if_drained(self, member: SimulatedMember) -> None:
        if member.state == "draining":
            is_idle = member.worker is None or member.worker.end is None
            if is_idle and not member.assigned:
                self._leave(member)

    def _leave(self, member: SimulatedMember) -> None:
        member.state, member.until = "gone", self._clock.now()
        if member.role == "target" and member.worker is not None:
            member.worker.cache.clear()

    def _undraft(self, jobs: Sequence[SimulatedRequest], delay: float) -> None:
        """The sequences decode plainly until another draft worker has opened them."""
        targets = {job.worker for job in jobs}
        for job in jobs:
            drafts = self.members.all[job.worker].drafts
            assert drafts is not None
            drafts.lost(job)
        for number in targets:
            self._reconsider(self.members.all[number])
        prefill = self._config.profile.draft_prefill_seconds.value * sum(job.length for job in jobs)
        self._at(self._clock.now() + delay + prefill, self._reopen)

    def _reopen(self) -> None:
        now = self._clock.now()
        for member in self.members.of("target", "ready", "draining"):
            if member.drafts is not None and member.drafts.reopen(now):
                self._reconsider(member)

    def _reconsider(self, member: SimulatedMember) -> None:
        worker = member.worker
        if worker is not None and worker.end is not None:
            before = worker.end
            worker.reconsider(self._clock.now())
            if worker.end != before:
                heappush(self.ends, (worker.end, member.id))

    def _update_load(self, member: SimulatedMember) -> None:
        if self._uses_caches:
            self._loads.assign(member.name, member.assigned)
        elif self._loads.has(member.name):
            self._loads.set(self._load(member))

    def _load(self, member: SimulatedMember) -> WorkerLoad:
        assert member.worker is not None
        return WorkerLoad(
            member.name,
            member.assigned,
            self._max_num_seqs,
            member.worker.kv_use,
            self._kv_tokens // self._unit,
        )


def busy_by_role(cluster: SimulatedCluster) -> dict[Role, float]:
    """Seconds in which the workers of each role ran steps."""
    found = dict.fromkeys(ROLES, 0.0)
    for member in cluster.members.all.values():
        found[member.role] += cluster.busy_seconds(member)
    return found
