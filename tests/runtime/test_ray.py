"""Workers as Ray actors on two virtual nodes: found by name, placed in pairs, killed and restarted."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("ray")

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import PacelineError
from paceline.runtime.deploy.deployment import observe_cluster
from paceline.runtime.deploy.ray_deployment import RayDeployment
from paceline.runtime.gateway_client.target_client import TargetClient
from tests.runtime.target_harness import StreamReader, until
from tests.runtime.test_processes import checkpoints, config, kill_with_streams, plain, requests, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[ClusterConfig]:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    try:
        yield config(checkpoints(tmp_path), tmp_path, ray=cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_missing_ray_cluster_is_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(PacelineError, match="no Ray cluster at 'auto': start one with `ray start --head`"):
        RayDeployment.up(config(("target", "draft"), tmp_path, ray="auto"))


@pytest.mark.slow  # test_processes.py and test_weight_ray.py kill workers too
def test_kill_9_on_ray_does_not_change_the_outputs(settings: ClusterConfig) -> None:
    with pytest.raises(PacelineError, match="not up"):
        RayDeployment.find(settings)
    deployment = RayDeployment.up(settings)
    with observe_cluster(settings) as pool:  # lists all configured workers, also those that are loading
        assert len(pool.workers()) == 4
    pids = deployment.pids()
    assert pids["target-0"][1] == pids["draft-0"][1] != pids["target-1"][1] == pids["draft-1"][1]  # one pair per node
    submitted = requests(64)
    with TargetClient(settings, deployment, start_seconds=60) as llm:
        until(lambda: len(llm.pool.workers()) == 4 and all(worker.state == "ready" for worker in llm.pool.workers()))
        reader = StreamReader(llm.pool, *submitted[:32])
        for _ in range(300):
            reader.read()
        os.kill(pids["draft-0"][0], signal.SIGKILL)
        for _ in range(300):
            reader.read()
        kill_with_streams(llm, pids["target-0"][0], reader, submitted[32:])
        assert tokens(reader) == plain(settings.targets[0].model, submitted)
        assert llm.pool.num_continued > 0
    again = RayDeployment.up(settings)  # a new gateway finds all workers, including restarted ones
    with TargetClient(settings, again, start_seconds=60) as llm:
        until(lambda: len(llm.pool.workers()) == 4 and all(worker.state == "ready" for worker in llm.pool.workers()))
        assert tokens(StreamReader(llm.pool, *submitted[:4])) == plain(settings.targets[0].model, submitted[:4])
    after = again.pids()
    assert {name for name in pids if pids[name] != after[name]} == {"draft-0", "target-0"}
    assert RayDeployment.down(settings) is True
    assert RayDeployment.down(replace(settings)) is False
