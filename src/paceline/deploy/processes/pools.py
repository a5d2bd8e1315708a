"""Live pools: makes the running workers those of the desired state, whatever runs them.

`ProcessPools` are pools of local processes. Files of the state folder hold the desired state and the members.
"""

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import PacelineError
from paceline.core.machine import usable_cores
from paceline.core.status import WorkerLife
from paceline.deploy.processes.state import DesiredFile, StateFolder
from paceline.deploy.processes.supervisor import POLL, Supervisor
from paceline.policy.scaling.changes import with_numbers
from paceline.policy.scaling.desired import DesiredState, RunningWorker, WorkerGoal, next_actions
from paceline.wire.worker_spec import (
    Member,
    PeerAddress,
    Phase,
    WorkerSpec,
    read_addresses,
    weight_server_name,
    weight_specs,
    worker_specs,
)

logger = logging.getLogger(__name__)

GONE_SECONDS = 60.0
"""Time for which `paceline status` lists a worker that has left."""


@dataclass(frozen=True, slots=True)
class HeldWorker:
    """A worker that a runner holds. It loads, serves, drains, or waits for its restart."""

    spec: WorkerSpec
    """Holds the addresses at which the worker listens. They are empty until they are known."""
    revision: int
    is_draining: bool
    life: WorkerLife


class WorkerRunner(Protocol):
    """Starts, drains and stops workers, and restarts those that exit. One thread calls all methods."""

    def workers(self) -> Mapping[str, HeldWorker]:
        """All workers by name. A worker that drains is listed until it has exited."""
        ...

    def start(self, goal: WorkerGoal, desired: DesiredState, peers: Mapping[str, str]) -> None:
        """Start a worker with a new name. `peers` maps `weight_server_name` to the addresses of running weight servers."""
        ...

    def drain(self, name: str, seconds: float) -> None:
        """Let a worker finish its work and exit within `seconds`. It is not restarted."""
        ...

    def set_peers(self, name: str, peers: tuple[PeerAddress, ...]) -> None:
        """Let the worker load from these peers when it is restarted."""
        ...

    def poll(self) -> None:
        """Detect workers that exited, and restart those whose delay has passed."""
        ...


@dataclass(frozen=True, slots=True)
class _Gone:
    member: Member
    since: float


class Pools:
    """One thread calls all methods."""

    def __init__(self, runner: WorkerRunner, clock: Clock | None = None) -> None:
        self._runner, self._clock = runner, clock or WallClock()
        self._gone: dict[str, _Gone] = {}
        self._weight_servers: Mapping[str, str] = {}
        """Addresses of weight servers that all running workers know as peers."""

    def poll(self, desired: DesiredState) -> tuple[Member, ...]:
        """Start and drain what the desired state asks for. Returns the members, also those that left in the last minute."""
        self._runner.poll()
        held = self._runner.workers()
        actions = next_actions(
            desired, {name: RunningWorker(worker.revision, worker.is_draining) for name, worker in held.items()}
        )
        for name in actions.drain:
            logger.info("%s drains: it has %g s", name, desired.drain_seconds)
            gone = replace(_member(held[name], desired), phase="gone")
            self._gone[name] = _Gone(gone, self._clock.now())
            self._runner.drain(name, desired.drain_seconds)
        for goal in actions.start:
            self._gone.pop(goal.name, None)
            self._runner.start(goal, desired, self._peers(goal, desired))
        self._refresh_peers(desired)
        return self._members(desired)

    def _peers(self, goal: WorkerGoal, desired: DesiredState) -> Mapping[str, str]:
        """Weight servers of the running workers with the same model. A worker of an earlier revision may hold equal weights
        with another tokenizer."""
        model = next(pool.model for pool in desired.revisions[goal.revision].pools if pool.name == goal.pool)
        running = self._with_weight_servers()
        return {
            weight_server_name(name): address
            for name, (worker, address) in running.items()
            if worker.spec.engine.model == model
        }

    def _refresh_peers(self, desired: DesiredState) -> None:
        """Let a worker that is restarted load from the workers that run then."""
        running = self._with_weight_servers()
        addresses = {weight_server_name(name): address for name, (_, address) in running.items()}
        if addresses == self._weight_servers:
            return
        self._weight_servers = addresses
        for name, (worker, _) in running.items():
            found = weight_specs(with_numbers(desired, worker.revision), addresses).get(name)
            if found is not None and worker.spec.weights is not None and found.peers != worker.spec.weights.peers:
                self._runner.set_peers(name, found.peers)

    def _with_weight_servers(self) -> dict[str, tuple[HeldWorker, str]]:
        """Workers that do not drain and whose weight servers have a known address, with that address."""
        return {
            name: (worker, worker.spec.weights.address)
            for name, worker in self._runner.workers().items()
            if worker.spec.weights is not None and worker.spec.weights.address and not worker.is_draining
        }

    def _members(self, desired: DesiredState) -> tuple[Member, ...]:
        now, held = self._clock.now(), self._runner.workers()
        for name, gone in list(self._gone.items()):
            if name in held:
                self._gone[name] = replace(gone, since=now)
            elif now - gone.since > GONE_SECONDS:
                del self._gone[name]
        gone_members = [gone.member for name, gone in self._gone.items() if name not in held]
        return (*(_member(worker, desired) for worker in held.values()), *gone_members)


def _member(worker: HeldWorker, desired: DesiredState) -> Member:
    goal = desired.goal(worker.spec.name)
    phase: Phase = "trial" if goal is not None and goal.is_on_trial else "serving"
    phase = "draining" if worker.is_draining else phase
    return replace(worker.spec.member(worker.spec.address), life=worker.life, phase=phase, revision=worker.revision)


class ProcessRunner:
    """A `WorkerRunner` of processes with an equal share of the cores. Each binds free ports and reports them in a file: a port
    that is chosen for a process may be taken when it binds it."""

    def __init__(self, folder: StateFolder, clock: Clock | None = None) -> None:
        self._folder = folder.path
        self._supervisor = Supervisor([], folder.logs, clock=clock)
        self._revisions: dict[str, int] = {}
        """Revision of each worker that runs or drains."""
        self._supervisor.start()

    def workers(self) -> Mapping[str, HeldWorker]:
        draining, lives = self._supervisor.draining, self._supervisor.lives
        return {
            name: HeldWorker(_listening(spec), self._revisions[name], name in draining, lives[name])
            for name, spec in self._supervisor.specs.items()
        }

    def start(self, goal: WorkerGoal, desired: DesiredState, peers: Mapping[str, str]) -> None:
        config = with_numbers(desired, goal.revision)
        threads = max(1, usable_cores() // max(1, len(desired.workers)))
        any_port = f"tcp://[{config.host}]:0" if ":" in config.host else f"tcp://{config.host}:0"
        addresses = {**peers, goal.name: any_port, weight_server_name(goal.name): any_port}
        spec = next(spec for spec in worker_specs(config, addresses, threads) if spec.name == goal.name)
        self._revisions[goal.name] = goal.revision
        self._supervisor.add(replace(spec, address_file=str(self._folder / f"{goal.name}.address")))

    def drain(self, name: str, seconds: float) -> None:
        self._supervisor.drain(name, seconds)

    def set_peers(self, name: str, peers: tuple[PeerAddress, ...]) -> None:
        spec = self._supervisor.specs[name]
        assert spec.weights is not None
        self._supervisor.update(replace(spec, weights=replace(spec.weights, peers=peers)))

    def poll(self) -> None:
        self._supervisor.poll()

    def stop(self) -> None:
        self._supervisor.stop()


class ProcessPools:
    """One thread calls all methods. The state folder has the members, for gateways and commands."""

    def __init__(self, folder: StateFolder, desired: DesiredState, clock: Clock | None = None) -> None:
        self._folder, self._desired = folder, desired
        self._file = DesiredFile(folder.path)
        self._runner = ProcessRunner(folder, clock)
        self._pools = Pools(self._runner, clock)
        self._written: tuple[Member, ...] | None = None
        self._file.write(desired)
        self._file.read_if_changed()

    def start(self) -> None:
        """Start all workers of the desired state."""
        self._poll()

    def run(self, stop: threading.Event) -> None:
        """Follow the desired state until `stop` is set, then stop all workers. A full disk, or too many files or processes,
        ends no worker: what failed is tried again."""
        problem = ""
        try:
            while not stop.wait(POLL):
                try:
                    self._poll()
                    problem = ""
                except OSError as error:
                    if str(error) != problem:
                        problem = str(error)
                        logger.error("the workers cannot be supervised: %s; it is tried again", error)
        finally:
            self.stop()

    def stop(self) -> None:
        self._runner.stop()

    def _poll(self) -> None:
        try:
            self._desired = self._file.read_if_changed() or self._desired
        except PacelineError as error:
            logger.error("%s; the workers stay as they are", error)
        members = self._pools.poll(self._desired)
        if members != self._written:
            self._folder.write(members)
            self._written = members


def _listening(spec: WorkerSpec) -> WorkerSpec:
    """The specification with the addresses that the worker has reported."""
    assert spec.address_file is not None
    found = read_addresses(Path(spec.address_file))
    weights = None if spec.weights is None else replace(spec.weights, address=found.weights)
    return replace(spec, address=found.worker, weights=weights)
