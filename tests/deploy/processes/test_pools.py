"""Live pools of processes: no port is chosen before the worker binds it."""

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from paceline.core.clock import VirtualClock
from paceline.core.cluster_config import cluster_config
from paceline.deploy.processes import pools
from paceline.deploy.processes.pools import ProcessPools
from paceline.deploy.processes.state import StateFolder
from paceline.deploy.processes.supervisor import Supervisor
from paceline.policy.scaling.desired import DesiredState
from paceline.wire.worker_spec import Member, WorkerSpec
from tests.processes.target_harness import until

WORKER = """
import os, socket, sys
from pathlib import Path
from paceline.wire.worker_spec import WorkerAddresses, WorkerSpec, write_addresses
spec = WorkerSpec.from_json(sys.argv[1])
ports = [int(address.rpartition(":")[2]) for address in (spec.address, spec.weights.address)]
sockets = [socket.create_server(("127.0.0.1", port)) for port in ports]
write_addresses(Path(spec.address_file), WorkerAddresses(*(f"tcp://127.0.0.1:{s.getsockname()[1]}" for s in sockets)))
sys.stdin.buffer.read()
"""
CONFIG = cluster_config({"pools": [{"name": "target", "role": "target", "model": "m", "replicas": 2}]})


@pytest.fixture
def specs() -> list[WorkerSpec]:
    """The specifications with which workers were started."""
    return []


@pytest.fixture
def running(
    specs: list[WorkerSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[ProcessPools, StateFolder, VirtualClock]]:
    def command(spec: WorkerSpec) -> list[str]:
        specs.append(spec)
        return [sys.executable, "-c", WORKER, spec.to_json()]

    monkeypatch.setattr(pools, "Supervisor", partial(Supervisor, command=command))
    folder, clock = StateFolder(tmp_path), VirtualClock()
    folder.acquire()
    running = ProcessPools(folder, DesiredState.of(CONFIG), clock)
    running.start()
    try:
        yield running, folder, clock
    finally:
        clock.advance(100)
        running.stop()
        folder.release()


def members(running: ProcessPools, folder: StateFolder) -> dict[str, Member]:
    running._poll()
    return {member.name: member for member in folder.members()}


def test_workers_bind_free_ports_and_report_them(
    running: tuple[ProcessPools, StateFolder, VirtualClock], specs: list[WorkerSpec]
) -> None:
    cluster, folder, _ = running
    until(lambda: all(member.address for member in members(cluster, folder).values()))
    assert {spec.address for spec in specs} == {"tcp://127.0.0.1:0"}
    assert {spec.weights.address for spec in specs if spec.weights} == {"tcp://127.0.0.1:0"}
    ports = [int(member.address.rpartition(":")[2]) for member in members(cluster, folder).values()]
    assert len(set(ports)) == 2
    assert 0 not in ports


def test_a_restarted_worker_has_no_address_until_it_listens_again(
    running: tuple[ProcessPools, StateFolder, VirtualClock],
) -> None:
    cluster, folder, clock = running
    until(lambda: all(member.address for member in members(cluster, folder).values()))
    supervisor = cluster._runner._supervisor
    first = members(cluster, folder)
    os.kill(supervisor.pids["target-0"], signal.SIGKILL)
    until(lambda: members(cluster, folder)["target-0"].life.last_exit == "SIGKILL")
    assert members(cluster, folder)["target-0"].address == first["target-0"].address
    clock.advance(1.0)
    supervisor.poll()
    assert not cluster._runner.workers()["target-0"].spec.address
    until(lambda: bool(members(cluster, folder)["target-0"].address))
    assert members(cluster, folder)["target-1"].address == first["target-1"].address


def test_a_worker_that_starts_later_loads_from_those_that_listen(
    running: tuple[ProcessPools, StateFolder, VirtualClock], specs: list[WorkerSpec]
) -> None:
    cluster, folder, _ = running
    until(lambda: all(member.address for member in members(cluster, folder).values()))
    folder.edit(lambda state: state.scaled("target", 3))
    until(lambda: "target-2" in members(cluster, folder))
    weights = {name: worker.spec.weights for name, worker in cluster._runner.workers().items() if name != "target-2"}
    assert specs[-1].weights is not None
    assert {peer.address for peer in specs[-1].weights.peers} == {own.address for own in weights.values() if own}
