"""Workers as Ray actors, and the actor that makes them those of the desired state, as the supervisor does for processes.

A `WorkerActor` runs one worker. `ActorRunner` creates, drains and kills the actors, and creates those again that died.
`PoolsActor` compares them with the desired state, which is in Ray's key-value store.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import ray
import ray._private.state
from ray.exceptions import ActorUnavailableError, RayError
from ray.experimental import internal_kv

from paceline.core.clock import Clock, WallClock
from paceline.core.status import WorkerLife
from paceline.deploy.processes import HeldWorker, Pools
from paceline.deploy.ray.placement import ActorPlacement, choose, remove_group, strategy
from paceline.policy.health import Backoff
from paceline.policy.scaling.changes import with_numbers
from paceline.policy.scaling.desired import DesiredState, WorkerGoal
from paceline.telemetry import log_as
from paceline.wire.worker_spec import Member, PeerAddress, WorkerSpec, weight_server_name, worker_specs

if TYPE_CHECKING:
    from paceline.worker import Process

logger = logging.getLogger(__name__)

ACTOR_STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ActorOrder:
    """What an actor is created with. The actor returns it to a restarted `PoolsActor`."""

    spec: WorkerSpec
    """Its addresses are those to bind: port 0, and the host may be `auto`."""
    revision: int
    placement: ActorPlacement
    restarts: int = 0
    last_exit: str = ""


@dataclass(frozen=True, slots=True)
class ActorReport:
    pid: int
    node: str
    """Ray's id of the node."""
    life: WorkerLife
    address: str = ""
    """Address at which the worker listens. Empty while it loads."""
    weight_address: str = ""
    is_draining: bool = False
    exit: str = ""
    """The reason why the worker has ended. Empty while it runs. The process still waits for `ray.kill`."""


class WorkerActor:
    """The class of the actors. SIGTERM drains its worker, as in a process of its own."""

    def __init__(self, order: ActorOrder) -> None:
        """Returns at once: the model is loaded by a thread, so that the actor can report and be stopped meanwhile."""
        import ray

        own = order.spec
        log_as(own.name)
        self._order, self._exit = order, ""
        self._process: Process | None = None
        self._life = WorkerLife(order.restarts, time.time(), order.last_exit)
        self._node = ray.get_runtime_context().get_node_id()
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        own = replace(own, address=own.address.replace("auto", host))
        if own.weights is not None:
            own = replace(own, weights=replace(own.weights, address=own.weights.address.replace("auto", host)))
        signal.signal(signal.SIGTERM, lambda *_: self.drain(own.drain_seconds))
        self._thread = threading.Thread(target=self._run, args=(own,), name=own.name, daemon=True)
        self._thread.start()

    def order(self) -> ActorOrder:
        return self._order

    def report(self) -> ActorReport:
        worker = None if self._process is None else self._process.worker
        report = ActorReport(os.getpid(), self._node, self._life, exit=self._exit)
        if self._process is None or worker is None:
            return report
        return replace(
            report,
            address=worker.address,
            weight_address=worker.weight_address,
            is_draining=self._process.is_draining,
        )

    def drain(self, seconds: float) -> None:
        """Take no new work. The result of `report` shows when the remaining work is done, which takes at most `seconds`."""
        if self._process is None:  # nothing is loaded yet
            os._exit(1)
        self._process.drain(seconds)

    def stop(self) -> None:
        """Stop the worker, and return when it has stopped. The caller then kills the actor."""
        if self._process is None:
            os._exit(1)
        self._process.stop()
        self._thread.join(ACTOR_STOP_SECONDS)

    def _run(self, spec: WorkerSpec) -> None:
        try:
            from paceline.worker import Process  # needs torch; the actor of the pools does not

            self._process = Process(spec)
            self._process.serve()
        except Exception as error:
            logger.exception("%s failed", spec.name)
            self._exit = f"status 1 ({error})"
        else:
            self._exit = "status 0"


GRACE = 10.0
"""Seconds that a worker has to end after its drain."""
REPORT_SECONDS = 0.2
"""Time to wait for reports; an actor that is not placed yet answers a later call."""
ADOPT_SECONDS = 30.0
"""Time in which running actors answer a restarted `PoolsActor`. Actors that do not answer are killed and created again."""
STOP_SECONDS = 15.0
MARGIN = 2.0
"""Seconds between the end of a worker and the end of its node."""
NAME_SECONDS = 0.5
"""Time until the next attempt, if Ray has not released the name of an actor that died."""


@dataclass(slots=True, eq=False)
class _Actor:
    order: ActorOrder
    handle: Any = None
    """Ray's handle. None if the actor has died and waits for its restart."""
    call: Any = None
    """Call of `report` under way: an actor that is not placed yet is called once, not every time."""
    report: ActorReport | None = None
    backoff: Backoff = field(default_factory=Backoff)
    created: float = 0.0
    restart_at: float = 0.0
    """Time of the next creation."""
    kill_at: float | None = None
    """Time at which a draining worker is killed. None if the worker does not drain."""
    leaves_node: bool = False
    """Whether the actor drains because its node does. It is then created again on another node."""

    @property
    def held(self) -> HeldWorker:
        order, report = self.order, self.report
        spec = replace(order.spec, address="" if report is None else report.address)
        if spec.weights is not None:
            spec = replace(spec, weights=replace(spec.weights, address="" if report is None else report.weight_address))
        life = WorkerLife(order.restarts, None, order.last_exit) if report is None else report.life
        return HeldWorker(spec, order.revision, self.kill_at is not None, life)


class ActorRunner:
    """A `WorkerRunner` of actors in one namespace of Ray, which is the cluster's name. The constructor finds those that run.

    Ray does not restart the actors: a worker is created again here, with a delay that doubles, its peers of that time, and its
    restarts counted.
    """

    def __init__(
        self, cluster: str, drain_seconds: float, not_workers: frozenset[str], clock: Clock | None = None
    ) -> None:
        """Draining workers that are found at the start get `drain_seconds` more. `not_workers` are the names of the actors in
        the namespace that are not workers."""
        self._cluster, self._clock = cluster, clock or WallClock()
        self._actors: dict[str, _Actor] = {}
        self._adopt(drain_seconds, not_workers)

    def workers(self) -> Mapping[str, HeldWorker]:
        return {name: actor.held for name, actor in self._actors.items()}

    def places(self) -> dict[str, tuple[int, str]]:
        """Process id and node of each worker that has loaded, by name."""
        reports = {name: actor.report for name, actor in self._actors.items()}
        return {
            name: (report.pid, report.node) for name, report in reports.items() if report is not None and report.address
        }

    def start(self, goal: WorkerGoal, desired: DesiredState, peers: Mapping[str, str]) -> None:
        placements = {name: actor.order.placement for name, actor in self._actors.items() if actor.kill_at is None}
        order = ActorOrder(ray_spec(goal, desired, peers), goal.revision, choose(goal, desired, placements))
        actor = self._actors[goal.name] = _Actor(order)
        self._create(actor)

    def drain(self, name: str, seconds: float) -> None:
        actor = self._actors[name]
        if actor.kill_at is not None:
            return
        actor.kill_at = self._clock.now() + seconds + GRACE
        if actor.handle is None or actor.report is None:  # it does not run, or not yet
            self._remove(actor)
        else:
            actor.handle.drain.remote(seconds)

    def set_peers(self, name: str, peers: tuple[PeerAddress, ...]) -> None:
        actor = self._actors[name]
        spec = actor.order.spec
        assert spec.weights is not None
        actor.order = replace(actor.order, spec=replace(spec, weights=replace(spec.weights, peers=peers)))

    def poll(self) -> None:
        now = self._clock.now()
        for actor in list(self._actors.values()):
            if actor.handle is None and now >= actor.restart_at:
                self._create(actor)
            if actor.handle is not None and actor.call is None:
                actor.call = actor.handle.report.remote()
        for actor in self._answered():
            self._handle(actor)
        self._leave_draining_nodes()
        for actor in list(self._actors.values()):
            if actor.kill_at is not None and now >= actor.kill_at:
                logger.warning("%s did not drain in time and is killed", actor.order.spec.name)
                self._remove(actor)

    def stop(self) -> None:
        """Stop all workers and remove their placement groups."""
        running = [actor for actor in self._actors.values() if actor.handle is not None]
        calls = [actor.handle.stop.remote() for actor in running]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=STOP_SECONDS)
        for actor in list(self._actors.values()):
            self._remove(actor)

    def _leave_draining_nodes(self) -> None:
        """Drain the workers of nodes that Ray is about to lose, such as pods that Kubernetes terminates."""
        deadlines = ray._private.state.state.get_draining_nodes()  # milliseconds since 1970, and 0 if there is no limit
        for actor in self._actors.values():
            if (
                actor.report is None
                or actor.report.node not in deadlines
                or actor.leaves_node
                or actor.kill_at is not None
            ):
                continue
            name, deadline = actor.order.spec.name, deadlines[actor.report.node]
            left = deadline / 1000 - time.time() - MARGIN if deadline else actor.order.spec.drain_seconds
            seconds = max(0.0, min(left, actor.order.spec.drain_seconds))
            logger.info("%s drains, because its node does: it has %g s", name, seconds)
            actor.handle.drain.remote(seconds)
            actor.leaves_node = True

    def _answered(self) -> list[_Actor]:
        calls = {actor.call: actor for actor in self._actors.values() if actor.call is not None}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=REPORT_SECONDS) if calls else ([], [])
        return [calls[call] for call in ready]

    def _handle(self, actor: _Actor) -> None:
        call, actor.call = actor.call, None
        try:
            report: ActorReport = ray.get(call)
        except ActorUnavailableError:  # a connection was lost for a moment
            return
        except RayError as error:
            self._ended(actor, "node lost" if "its node has died" in str(error) else "process lost")
            return
        actor.report = report
        if report.exit:
            self._ended(actor, report.exit)

    def _ended(self, actor: _Actor, reason: str) -> None:
        name = actor.order.spec.name
        if actor.kill_at is not None:
            logger.info("%s has drained: %s", name, reason)
            self._remove(actor)
            return
        now = self._clock.now()
        delay = actor.backoff.delay(now - actor.created)
        logger.warning("%s ended with %s; creating it again in %.1f s", name, reason, delay)
        _kill(actor)
        actor.restart_at = now + delay
        actor.order = replace(actor.order, restarts=actor.order.restarts + 1, last_exit=reason)

    def _remove(self, actor: _Actor) -> None:
        _kill(actor)
        del self._actors[actor.order.spec.name]
        group = actor.order.placement.group_name
        if group and not any(kept.order.placement.group_name == group for kept in self._actors.values()):
            remove_group(self._cluster, group)

    def _create(self, actor: _Actor) -> None:
        placement, name = actor.order.placement, actor.order.spec.name
        nodes = {other: found.report.node for other, found in self._actors.items() if found.report is not None}
        actor.created = self._clock.now()
        try:
            actor.handle = (
                ray.remote(WorkerActor)
                .options(
                    name=name,
                    namespace=self._cluster,
                    lifetime="detached",
                    max_concurrency=4,
                    scheduling_strategy=strategy(placement, self._cluster, nodes),
                    num_cpus=placement.own.num_cpus,
                    num_gpus=placement.own.num_gpus,
                )
                .remote(actor.order)
            )
        except ValueError as error:
            if "already taken" in str(error):
                actor.restart_at = actor.created + NAME_SECONDS
            else:  # such as resources that its placement group does not have
                self._ended(actor, f"not created ({error})")

    def _adopt(self, drain_seconds: float, not_workers: frozenset[str]) -> None:
        """Find the actors that run, as a restarted `PoolsActor` does."""
        listed = ray.util.list_named_actors(all_namespaces=True)
        names = {entry["name"] for entry in listed if entry["namespace"] == self._cluster} - not_workers
        calls: dict[Any, tuple[Any, Any]] = {}
        for name in names:
            with suppress(ValueError):  # it has just died
                handle = ray.get_actor(name, self._cluster)
                calls[handle.order.remote()] = (handle.report.remote(), handle)
        ready, others = ray.wait(list(calls), num_returns=len(calls), timeout=ADOPT_SECONDS) if calls else ([], [])
        for call in ready:
            with suppress(RayError):
                order, report = ray.get([call, calls[call][0]])
                kill_at = self._clock.now() + drain_seconds + GRACE if report.is_draining else None
                actor = _Actor(order, calls[call][1], report=report, created=self._clock.now(), kill_at=kill_at)
                self._actors[order.spec.name] = actor
        for call in others:  # not placed yet, or hung
            ray.kill(calls[call][1], no_restart=True)


def ray_spec(goal: WorkerGoal, desired: DesiredState, peers: Mapping[str, str]) -> WorkerSpec:
    """The specification of an actor: free ports, a thread for each reserved CPU, and the GPUs that Ray shows it, from 0."""
    config = with_numbers(desired, goal.revision)
    own = f"tcp://{config.host}:0"
    addresses = {**peers, goal.name: own, weight_server_name(goal.name): own}
    resources = next(pool.ray for pool in config.pools if pool.name == goal.pool)
    threads = max(1, int(resources.num_cpus))
    spec = next(found for found in worker_specs(config, addresses, threads) if found.name == goal.name)
    return replace(spec, engine=replace(spec.engine, device="cuda:0")) if resources.num_gpus else spec


def _kill(actor: _Actor) -> None:
    if actor.handle is not None:
        ray.kill(actor.handle, no_restart=True)
    actor.handle = actor.call = actor.report = None
    actor.leaves_node = False


NAME = "paceline-pools"
POLL = 0.3


class PoolsActor:
    """The class of the actor. The desired state is in Ray's key-value store, so that a restarted actor continues."""

    def __init__(self, cluster: str, state: bytes) -> None:
        """`state` is the desired state to use if none is stored for this cluster."""
        log_as("pools")
        self._key = f"paceline/{cluster}".encode()
        stored = internal_kv._internal_kv_get(self._key)
        self._desired = msgspec.json.decode(stored or state, type=DesiredState)
        self._save(self._desired)
        self._runner = ActorRunner(cluster, self._desired.drain_seconds, frozenset({NAME}))
        self._pools = Pools(self._runner)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._members: Sequence[Member] = self._pools.poll(self._desired)
        self._places: dict[str, tuple[int, str]] = {}
        self._thread = threading.Thread(target=self._run, name="pools", daemon=True)
        self._thread.start()

    def members(self) -> Sequence[Member]:
        """All workers, also those without an address yet, and those that left in the last minute."""
        return self._members

    def places(self) -> dict[str, tuple[int, str]]:
        """Process id and node of each worker that has loaded, by name."""
        return self._places

    def desired(self) -> bytes:
        return msgspec.json.encode(self._desired)

    def swap(self, old: bytes, new: bytes) -> bool:
        """Replace the desired state, if it is still `old`."""
        with self._lock:
            if self.desired() != old:
                return False
            self._save(msgspec.json.decode(new, type=DesiredState))
        return True

    def stop(self) -> None:
        """Stop all workers, remove their placement groups, and forget the desired state."""
        self._stop.set()
        self._thread.join()
        self._runner.stop()
        internal_kv._internal_kv_del(self._key)

    def _save(self, state: DesiredState) -> None:
        internal_kv._internal_kv_put(self._key, msgspec.json.encode(state), overwrite=True)
        self._desired = state

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            try:
                self._members = self._pools.poll(self._desired)
                self._places = self._runner.places()
            except Exception:
                logger.exception("the workers could not be made those of the desired state; the next attempt follows")
