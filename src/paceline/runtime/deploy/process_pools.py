"""Live pools of local processes. Files of the state folder hold the desired state and the members."""

import logging
import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.cluster.scaling.changes import with_numbers
from paceline.cluster.scaling.desired import DesiredState, WorkerGoal
from paceline.core.clock import Clock
from paceline.core.errors import PacelineError
from paceline.core.machine import usable_cores
from paceline.runtime.deploy.directory import Member
from paceline.runtime.deploy.pools import HeldWorker, Pools
from paceline.runtime.deploy.state import DesiredFile, StateFolder
from paceline.runtime.deploy.supervisor import POLL, Supervisor
from paceline.runtime.deploy.worker_spec import worker_specs
from paceline.runtime.weights.spec import PeerAddress, weight_server_name

logger = logging.getLogger(__name__)


class ProcessRunner:
    """A `WorkerRunner` of processes: a free port each, kept over restarts, and an equal share of the cores."""

    def __init__(self, logs: Path, clock: Clock | None = None) -> None:
        self._supervisor = Supervisor([], logs, clock=clock)
        self._revisions: dict[str, int] = {}
        """Revision of each worker that runs or drains."""
        self._supervisor.start()

    def workers(self) -> Mapping[str, HeldWorker]:
        draining, lives = self._supervisor.draining, self._supervisor.lives
        return {
            name: HeldWorker(spec, self._revisions[name], name in draining, lives[name])
            for name, spec in self._supervisor.specs.items()
        }

    def start(self, goal: WorkerGoal, desired: DesiredState, peers: Mapping[str, str]) -> None:
        config = with_numbers(desired, goal.revision)
        threads = max(1, usable_cores() // max(1, len(desired.workers)))
        address, weights = free_addresses(config.host, 2)
        addresses = {**peers, goal.name: address, weight_server_name(goal.name): weights}
        self._revisions[goal.name] = goal.revision
        self._supervisor.add(next(spec for spec in worker_specs(config, addresses, threads) if spec.name == goal.name))

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
        self._runner = ProcessRunner(folder.logs, clock)
        self._pools = Pools(self._runner, clock)
        self._written: tuple[Member, ...] | None = None
        self._file.write(desired)
        self._file.read_if_changed()

    def start(self) -> None:
        """Start all workers of the desired state."""
        self._poll()

    def run(self, stop: threading.Event) -> None:
        """Follow the desired state until `stop` is set, then stop all workers."""
        try:
            while not stop.wait(POLL):
                self._poll()
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
            self._written = members
            self._folder.write(members)


def free_addresses(host: str, count: int) -> list[str]:
    """Addresses with free ports. All are bound until all are found, so that they differ."""
    host = "127.0.0.1" if host == "auto" else host
    held = [socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) for _ in range(count)]
    try:
        for reserved in held:
            reserved.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return [f"tcp://{shown}:{reserved.getsockname()[1]}" for reserved in held]
    finally:
        for reserved in held:
            reserved.close()
