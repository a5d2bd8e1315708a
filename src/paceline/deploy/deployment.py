"""Starts, finds and stops the workers of a cluster, from its configuration."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import PacelineError
from paceline.core.machine import usable_cores
from paceline.deploy.processes import LivePools, NotUp, ProcessPools, StateFolder
from paceline.policy.scaling.desired import DesiredState
from paceline.targets import TargetPool
from paceline.wire.keys import KeyFolder, KeyPair
from paceline.wire.worker_spec import Directory, WorkerSpec, weight_server_name, worker_specs

STOP_SECONDS = 30.0
UP = b"up"
"""Result of the supervisor once its workers are started. Any other result is an error message."""


def gateway_key(config: ClusterConfig) -> KeyPair | None:
    return None if config.keys is None else KeyFolder(Path(config.keys)).key_pair("gateway")


def process_specs(config: ClusterConfig) -> list[WorkerSpec]:
    """Specifications of local processes whose addresses are known before they start: a free port each, kept over restarts."""
    threads = max(1, usable_cores() // sum(pool.replicas for pool in config.pools))
    return worker_specs(config, _addresses(config), threads)


@contextmanager
def running_processes(config: ClusterConfig, folder: StateFolder) -> Iterator[Directory]:
    """Live pools for the duration of the block. Raises `AlreadyUp` if another process runs them."""
    folder.acquire()
    stop = threading.Event()
    try:
        pools = ProcessPools(folder, DesiredState.of(config))
        try:
            pools.start()
        except BaseException:
            pools.stop()
            raise
        thread = threading.Thread(target=pools.run, args=(stop,), name="paceline-supervisor")
        thread.start()
        try:
            yield folder
        finally:
            stop.set()
            thread.join()
    finally:
        folder.release()


@contextmanager
def open_cluster(config: ClusterConfig) -> Iterator[Directory]:
    """The workers of a cluster: on Ray, those started by `up`, or else processes that end with the block."""
    if config.ray is not None:
        from paceline.deploy.ray import RayDeployment

        yield RayDeployment.find_or_up(config)
        return
    folder = StateFolder.of(config)
    if folder.read() is not None:
        yield folder
    else:
        with running_processes(config, folder) as directory:
            yield directory


def find_cluster(config: ClusterConfig) -> Directory:
    """The running workers. Raises `NotUp` if there are none."""
    if config.ray is not None:
        from paceline.deploy.ray import RayDeployment

        return RayDeployment.find(config)
    folder = StateFolder.of(config)
    if folder.read() is None:
        raise NotUp(f"cluster {config.name!r} is not up: start it with `paceline up`")
    return folder


def is_up(config: ClusterConfig) -> bool:
    """Whether the cluster has running workers, which `open_cluster` would use."""
    try:
        find_cluster(config)
    except NotUp:
        return False
    return True


def live_pools(config: ClusterConfig) -> LivePools:
    """The running pools, which can be changed. Raises `NotUp` if there are none."""
    if config.ray is not None:
        from paceline.deploy.ray import RayDeployment

        return RayDeployment.find(config)
    find_cluster(config)
    return StateFolder.of(config)


@contextmanager
def observe_cluster(config: ClusterConfig) -> Iterator[TargetPool]:
    """A pool that reads the status of a running cluster and submits no requests."""
    quiet = replace(config, router="least_loaded", health=replace(config.health, canary=0.0))
    pool = TargetPool(quiet, find_cluster(config), gateway_key(config))
    try:
        yield pool
    finally:
        pool.close()


def up(path: Path, config: ClusterConfig) -> StateFolder:
    """Start a supervisor process that outlives this one. Returns when it has started its workers."""
    folder = StateFolder.of(config)
    folder.acquire()  # raises here rather than in the supervisor
    folder.release()
    folder.logs.mkdir(parents=True, exist_ok=True)
    ready, descriptor = os.pipe()
    try:
        with (folder.logs / "supervisor.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "paceline.deploy.supervise", str(path.resolve()), str(descriptor)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(descriptor,),
                check=False,
            )
    finally:
        os.close(descriptor)
    with os.fdopen(ready, "rb") as file:
        result = file.read()
    if result != UP:
        unknown = f"the workers could not be started; see {folder.logs / 'supervisor.log'}"
        raise PacelineError(result.decode() or unknown)
    return folder


def down(config: ClusterConfig) -> bool:
    """Stop all workers that `up` started. Returns whether there were any."""
    if config.ray is not None:
        from paceline.deploy.ray import RayDeployment

        return RayDeployment.down(config)
    return StateFolder.of(config).stop(STOP_SECONDS)


def free_address() -> str:
    """A loopback address with a free port."""
    return _free_addresses("127.0.0.1", 1)[0]


def _addresses(config: ClusterConfig) -> Mapping[str, str]:
    """A free port for each worker and one for its weight server."""
    workers = [name for pool in config.pools for name in pool.worker_names]
    names = [*workers, *map(weight_server_name, workers)]
    return dict(zip(names, _free_addresses(config.host, len(names)), strict=True))


def _free_addresses(host: str, count: int) -> list[str]:
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
