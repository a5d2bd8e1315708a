"""Ray's autoscaler adds a node for a worker that a pool asked for, replaces a node that is lost, and removes an idle one."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.deploy.ray.deployment import RayDeployment
from paceline.targets.client import TargetClient
from tests.processes.ray_cluster import autoscaling_ray_cluster, ray
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import checkpoints, config, plain, requests, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def drain_node(node: str) -> None:
    """Let Ray drain a node for up to 20 seconds, as on SIGTERM of `ray start --block`."""
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    deadline = int(1000 * (time.time() + 20))
    client = ray._private.worker.global_worker.gcs_client
    client.drain_node(node, reason, "test", deadline)


def test_nodes_come_and_go_with_workers(tmp_path: Path) -> None:
    models, submitted = checkpoints(tmp_path), requests(8, max_tokens=24)
    with autoscaling_ray_cluster(tmp_path, max_nodes=2) as address:
        settings = config(models, tmp_path, ray=address)
        settings = replace(settings, pools=(replace(settings.targets[0], replicas=1),))
        deployment = RayDeployment.up(settings)
        with TargetClient(settings, deployment, start_seconds=60) as llm:
            deployment.pids()
            assert num_nodes() == 1
            deployment.edit(lambda state: state.scaled("target", 2))
            until(lambda: [row.state for row in llm.pool.workers()] == ["ready", "ready"])
            assert num_nodes() == 2
            (_, first), (_, second) = deployment.pids().values()
            assert first != second
            reader = StreamReader(llm.pool, *submitted)
            drain_node(second)
            until(lambda: [row.life.last_exit for row in llm.pool.workers()] == ["", "status 0"])
            until(lambda: [row.state for row in llm.pool.workers()] == ["ready", "ready"])
            assert deployment.pids()["target-1"][1] not in (first, second)
            assert tokens(reader) == plain(models[0], submitted)
            deployment.edit(lambda state: state.scaled("target", 1))
            until(lambda: [row.state for row in llm.pool.workers()] == ["ready", "gone"])
            until(lambda: num_nodes() == 1)
        assert RayDeployment.down(settings) is True
