"""From a cluster's configuration to workers that run, and to a way of finding them."""

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
from paceline.runtime.deploy.directory import Directory
from paceline.runtime.deploy.state import StateFolder
from paceline.runtime.deploy.supervisor import Supervisor
from paceline.runtime.deploy.worker_spec import WorkerSpec, worker_specs
from paceline.runtime.gateway_client.target_pool import TargetPool
from paceline.runtime.weights.spec import weight_server_name
from paceline.runtime.wire.keys import KeyFolder, KeyPair

STOP_SECONDS = 30.0
UP = b"up"
"""What the supervisor says once its workers are started; all else is what is wrong."""


def gateway_key(config: ClusterConfig) -> KeyPair | None:
    return None if config.keys is None else KeyFolder(Path(config.keys)).key_pair("gateway")


def process_specs(config: ClusterConfig) -> list[WorkerSpec]:
    """For local processes: free ports, which stay theirs over restarts, and a share of the cores each."""
    workers = sum(pool.replicas for pool in config.pools)
    threads = max(1, usable_cores() // workers)
    return worker_specs(config, _addresses(config), threads)


@contextmanager
def running_processes(config: ClusterConfig, folder: StateFolder) -> Iterator[Directory]:
    """Workers for the length of the block. Raises `AlreadyUp` when they are up elsewhere."""
    folder.acquire()
    stop = threading.Event()
    try:
        specs = process_specs(config)
        supervisor = Supervisor(specs, folder.logs)
        supervisor.start()
        thread = threading.Thread(target=supervisor.run, args=(stop,), name="paceline-supervisor")
        thread.start()
        try:
            folder.write([spec.member(spec.address) for spec in specs])
            yield folder
        finally:
            stop.set()
            thread.join()
    finally:
        folder.release()


@contextmanager
def cluster(config: ClusterConfig) -> Iterator[Directory]:
    """The workers of a cluster: on Ray, or those that `up` started, or else processes that end with the block."""
    if config.ray is not None:
        from paceline.runtime.deploy.ray_deployment import RayDeployment

        yield RayDeployment.up(config)
        return
    folder = StateFolder.of(config)
    if folder.read() is not None:
        yield folder
    else:
        with running_processes(config, folder) as directory:
            yield directory


def find(config: ClusterConfig) -> Directory:
    """The workers that are up. Raises when there are none."""
    if config.ray is not None:
        from paceline.runtime.deploy.ray_deployment import RayDeployment

        return RayDeployment.find(config)
    folder = StateFolder.of(config)
    if folder.read() is None:
        raise PacelineError(f"cluster {config.name!r} is not up: start it with `paceline up`")
    return folder


@contextmanager
def observed(config: ClusterConfig) -> Iterator[TargetPool]:
    """A look at a cluster that is up, by somebody who asks nothing of it."""
    quiet = replace(config, router="least_loaded", health=replace(config.health, canary=0.0))
    pool = TargetPool(quiet, find(config), gateway_key(config))
    try:
        yield pool
    finally:
        pool.close()


def up(path: Path, config: ClusterConfig) -> StateFolder:
    """Start a supervisor of its own, which outlives this process. Returns when it has started its workers."""
    folder = StateFolder.of(config)
    folder.acquire()  # so that what is wrong is told here
    folder.release()
    folder.logs.mkdir(parents=True, exist_ok=True)
    ready, tell = os.pipe()
    try:
        with (folder.logs / "supervisor.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-m", "paceline.runtime.deploy.supervise", str(path.resolve()), str(tell)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(tell,),
                check=False,
            )
    finally:
        os.close(tell)
    with os.fdopen(ready, "rb") as answer:
        said = answer.read()
    if said != UP:
        unsaid = f"the workers could not be started; {folder.logs / 'supervisor.log'} says why"
        raise PacelineError(said.decode() or unsaid)
    return folder


def down(config: ClusterConfig) -> bool:
    """End all workers that `up` started. Returns whether there were any."""
    if config.ray is not None:
        from paceline.runtime.deploy.ray_deployment import RayDeployment

        return RayDeployment.down(config)
    return StateFolder.of(config).stop(STOP_SECONDS)


def _addresses(config: ClusterConfig) -> Mapping[str, str]:
    """A free port each, and one for the door where it gives its weights; all are held until all are found."""
    workers = [name for pool in config.pools for name in pool.worker_names]
    names = [*workers, *map(weight_server_name, workers)]
    host = "127.0.0.1" if config.host == "auto" else config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = [socket.socket(family) for _ in names]
    try:
        for one in held:
            one.bind((host, 0))
        shown = f"[{host}]" if ":" in host else host
        return {name: f"tcp://{shown}:{one.getsockname()[1]}" for name, one in zip(names, held, strict=True)}
    finally:
        for one in held:
            one.close()
