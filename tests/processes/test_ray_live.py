"""Live pools on two virtual nodes of Ray: pairs, drains, a rolling change, a lost control actor, and the commands."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.commands import cli
from paceline.core.cluster_config import ClusterConfig
from paceline.deploy.deployment import live_pools, observe_cluster
from paceline.deploy.processes.rollout import RolloutRun
from paceline.deploy.processes.state import AlreadyUp
from paceline.deploy.ray.deployment import RayDeployment
from paceline.policy.scaling.rollout import RolloutRule
from paceline.targets.client import TargetClient
from tests.engine.start.test_build import LETTERS, save_checkpoint
from tests.processes.ray_cluster import ray, ray_cluster
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import LIMITS, checkpoints, config, kill_with_streams, plain, requests, tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster(3, 3) as found:
        yield found


@pytest.fixture
def settings(tmp_path: Path, address: str, request: pytest.FixtureRequest) -> Iterator[ClusterConfig]:
    """Two targets and two draft workers, placed in pairs."""
    found = config(checkpoints(tmp_path), tmp_path, ray=address, name=request.node.name)
    yield found
    RayDeployment.down(found)


def states(llm: TargetClient) -> dict[str, str]:
    return {row.name: row.state for row in llm.pool.workers()}


def all_ready(llm: TargetClient, *names: str) -> bool:
    found = states(llm)
    return [found.get(name) for name in names] == ["ready"] * len(names)


ALL = ("target-0", "target-1", "draft-0", "draft-1")


def test_kill_9_on_ray_does_not_change_the_outputs(settings: ClusterConfig) -> None:
    deployment = RayDeployment.up(settings)
    with observe_cluster(settings) as pool:  # lists all configured workers, also those that are loading
        until(lambda: len(pool.workers()) == 4)
    with pytest.raises(AlreadyUp, match="`paceline apply` changes it"):
        RayDeployment.up(settings)
    pids = deployment.pids()
    assert pids["target-0"][1] == pids["draft-0"][1] != pids["target-1"][1] == pids["draft-1"][1]  # one pair per node
    submitted = requests(64)
    with TargetClient(settings, deployment, start_seconds=60) as llm:
        until(lambda: all_ready(llm, *ALL))
        reader = StreamReader(llm.pool, *submitted[:32])
        for _ in range(300):
            reader.read()
        os.kill(pids["draft-0"][0], signal.SIGKILL)
        for _ in range(300):
            reader.read()
        kill_with_streams(llm, pids["target-0"][0], reader, submitted[32:])
        assert tokens(reader) == plain(settings.targets[0].model, submitted)
        assert llm.pool.num_continued > 0
    again = RayDeployment.find_or_up(settings)  # a new gateway finds all workers, including restarted ones
    with TargetClient(settings, again, start_seconds=60) as llm:
        until(lambda: all_ready(llm, *ALL))
        assert tokens(StreamReader(llm.pool, *submitted[:4])) == plain(settings.targets[0].model, submitted[:4])
        restarts = {row.name: row.life.restarts for row in llm.pool.workers()}
    after = again.pids()
    assert {name for name in pids if pids[name] != after[name]} == {"draft-0", "target-0"}
    assert {name for name, count in restarts.items() if count} == {"draft-0", "target-0"}
    assert {name: node for name, (_, node) in pids.items()} == {name: node for name, (_, node) in after.items()}


def test_pools_change_under_load(settings: ClusterConfig) -> None:
    """tests/processes/test_live.py has the same on processes."""
    target, draft = settings.pools
    settings = replace(settings, pools=(replace(target, replicas=1), replace(draft, replicas=0)), drain_seconds=5.0)
    deployment = RayDeployment.up(settings)
    submitted = requests(40)
    with TargetClient(settings, deployment, start_seconds=60) as llm:
        until(lambda: all_ready(llm, "target-0"))
        reader = StreamReader(llm.pool, *submitted[:16])
        deployment.edit(lambda state: state.scaled("target", 2).scaled("draft", 1))
        until(lambda: all_ready(llm, "target-0", "target-1", "draft-0"))
        pids = deployment.pids()
        assert pids["draft-0"][1] == pids["target-0"][1]
        reader.submit(*submitted[16:24])
        before = {row.name: row.life for row in llm.pool.workers()}
        ray.kill(deployment._pools, no_restart=False)  # Ray restarts the control actor; workers go on
        deployment.edit(lambda state: state.without("target-0").scaled("draft", 0))
        until(lambda: [states(llm).get(name) for name in ("target-0", "draft-0")] == ["gone", "gone"])
        after = {row.name: row.life for row in llm.pool.workers()}
        assert after["target-1"] == before["target-1"]
        assert deployment.pids()["target-1"] == pids["target-1"]
        reader.submit(*submitted[24:32])
        os.kill(pids["target-1"][0], signal.SIGTERM)  # a drain with a deadline, then a restart
        until(lambda: [row.life.restarts for row in llm.pool.workers() if row.name == "target-1"] == [1])
        until(lambda: all_ready(llm, "target-1"))
        assert next(row for row in llm.pool.workers() if row.name == "target-1").life.last_exit == "status 0"
        reader.submit(*submitted[32:])
        state = deployment.edit(lambda state: state.with_revision(settings))
        rule = RolloutRule(start_seconds=60, drain_seconds=5)
        assert RolloutRun(deployment, llm.pool).run("target", state.newest, rule) == ""
        assert [(goal.name, goal.revision) for goal in deployment.desired().workers] == [("target-1", state.newest)]
        assert tokens(reader) == plain(settings.targets[0].model, submitted)


def test_commands_change_pools_on_ray(address: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "target")
    save_checkpoint(tmp_path / "draft")
    save_checkpoint(tmp_path / "second", seed=7)
    save_checkpoint(tmp_path / "other", letters=LETTERS[::-1])
    file = tmp_path / "cluster.yaml"

    def write(**target: Any) -> None:
        common = {"devices": ["cpu"], "limits": LIMITS, "ray": {"num_cpus": 0.5}}
        pools = [
            {"name": "target", "role": "target", "model": str(tmp_path / "target"), **common, **target},
            {"name": "draft", "role": "draft", "model": str(tmp_path / "draft"), "replicas": 0, **common},
        ]
        file.write_text(json.dumps({"name": "commands", "drain_seconds": 5, "pools": pools}))  # JSON is YAML

    def paceline(*words: str, status: int = 0) -> str:
        result = CliRunner().invoke(cli, [*words, "--ray", address], env={"COLUMNS": "200"})
        assert result.exit_code == status, result.output
        return result.output

    def workers() -> dict[str, tuple[str, int]]:
        document = json.loads(paceline("status", str(file), "--json"))
        return {row["name"]: (row["state"], row["life"]["restarts"]) for row in document["workers"]}

    at = ("--config", str(file))
    write()
    paceline("up", str(file))
    try:
        assert "already up" in paceline("up", str(file), status=2)
        paceline("scale", "target", "2", *at)
        assert "the pool had no other draft" in paceline("draft", "swap", "draft", str(tmp_path / "second"), *at)
        assert workers() == {"target-0": ("ready", 0), "target-1": ("ready", 0), "draft-0": ("ready", 0)}
        refused = paceline("draft", "swap", "draft", str(tmp_path / "other"), *at, status=2)
        assert "differ in their vocabulary" in refused
        paceline("drain", "target-0", *at)
        assert workers()["target-0"] == ("gone", 0)
        paceline("rollout", "target", *at)
        write(speculation={"depth": "fixed", "max_depth": 2}, replicas=1)
        plan = paceline("apply", str(file), "--yes")
        assert "~ target-1: replace, one at a time" in plan
        assert "- draft-0: drain (replicas 1 -> 0)" in plan
        assert "the workers are as the file says" in paceline("apply", str(file), "--yes")
        found = live_pools(replace(_config(file), ray=address)).desired().config
        assert asdict(found)["pools"] == asdict(_config(file))["pools"]
    finally:
        paceline("down", str(file))
    assert "was not up" in paceline("down", str(file), status=1)


def _config(file: Path) -> ClusterConfig:
    from paceline.deploy.processes.cluster_file import load_cluster

    return load_cluster(file)
