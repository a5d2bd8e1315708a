"""Ray clusters for tests: virtual nodes on this machine, started again if a busy machine makes a start fail.

A module that imports this one is skipped without Ray.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from paceline.deploy.deployment import free_address
from tests.processes.target_harness import until

ATTEMPTS = 3
STORE = 150 * 2**20
"""Bytes of a node's object store."""
PATIENCE = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_niceness": "0",
}
"""Settings of Ray for machines that run other tests: higher limits, and actors with the priority of the tests."""

os.environ.update(PATIENCE)  # Ray reads them when it is imported
ray: Any = pytest.importorskip("ray")

UNUSED = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
    "cluster_synced_files",
    "rsync_exclude",
    "rsync_filter",
)
"""Settings that Ray's autoscaler requires and that virtual nodes do not use."""


@contextmanager
def ray_cluster(*cpus: float) -> Iterator[str]:
    """The address of a Ray cluster with a node for each number of logical CPUs. The first one is the head."""
    cluster = _start(cpus)
    try:
        yield str(cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def _start(cpus: tuple[float, ...]) -> Any:
    from ray.cluster_utils import Cluster

    own = psutil.Process()
    for attempt in range(ATTEMPTS):
        cluster, before = Cluster(initialize_head=False), set(own.children())
        try:
            for count in cpus:
                cluster.add_node(num_cpus=count, include_dashboard=False)
            cluster.wait_for_nodes(60)
        except Exception:
            with suppress(Exception):
                cluster.shutdown()
            for process in set(own.children()) - before:  # those of a node whose start failed
                process.kill()
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return cluster
    raise AssertionError


@contextmanager
def autoscaling_ray_cluster(folder: Path, max_nodes: int) -> Iterator[str]:
    """The address of a Ray cluster whose autoscaler adds virtual nodes of one CPU to a head of one CPU, and removes idle ones.

    `ray.cluster_utils.AutoscalingCluster` would run `ray stop --force`, which stops all other Ray clusters of the machine.
    """
    from ray._private.services import get_node_ip_address
    from ray.autoscaler._private.fake_multi_node.node_provider import (
        FAKE_HEAD_NODE_ID,
        FAKE_HEAD_NODE_TYPE,
        FakeMultiNodeProvider,
    )

    address = f"{get_node_ip_address()}:{urlsplit(free_address()).port}"
    provider = {
        "type": "external",
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
        "gcs_address": address,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    head = {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0}
    node = {"resources": {"CPU": 1, "object_store_memory": STORE}, "node_config": {}, "max_workers": max_nodes}
    config: dict[str, Any] = {
        "cluster_name": "fake",
        "max_workers": max_nodes,
        "provider": provider,
        "available_node_types": {FAKE_HEAD_NODE_TYPE: head, "node": {**node, "min_workers": 0}},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }
    config |= {name: [] for name in UNUSED}
    (folder / "autoscaling.json").write_text(json.dumps(config))  # JSON is YAML
    words = (
        f"start --head --port {address.rpartition(':')[2]} --num-cpus 1 --object-store-memory {STORE} --include-dashboard "
        f"false --disable-usage-stats --autoscaling-config {folder / 'autoscaling.json'} --block"
    )
    settings = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1"}
    settings |= dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), FAKE_HEAD_NODE_ID)
    program = [sys.executable, "-c", "import sys; from ray.scripts.scripts import main; sys.exit(main())"]
    with (
        (folder / "head.log").open("wb") as log,
        subprocess.Popen([*program, *words.split()], env={**os.environ, **settings}, stdout=log, stderr=log) as process,
    ):
        try:
            until(lambda: "Ray runtime started" in (folder / "head.log").read_text())
            yield address
        finally:
            ray.shutdown()
            process.terminate()
