"""An actor that Ray restarts loads its model from peers when the files are gone."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.deploy.ray.deployment import RayDeployment
from paceline.targets.client import TargetClient
from tests.processes.ray_cluster import ray_cluster
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import PATIENT, checkpoints, config, plain, requests, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


def test_a_killed_actor_reloads_its_model_from_a_peer(tmp_path: Path) -> None:
    models = checkpoints(tmp_path)
    requested = requests(8, max_tokens=24)
    expected = plain(models[0], requested)
    with ray_cluster(2) as address:
        settings = config(models, tmp_path, ray=address, health={"canary": 0.0, **PATIENT})
        settings = replace(settings, pools=settings.targets)
        deployment = RayDeployment.up(settings)
        pids = deployment.pids()
        with TargetClient(settings, deployment, start_seconds=60) as llm:
            until(
                lambda: len(llm.pool.workers()) == 2 and all(worker.state == "ready" for worker in llm.pool.workers())
            )
            Path(models[0]).rename(tmp_path / "gone")
            os.kill(pids["target-0"][0], signal.SIGKILL)
            until(lambda: any(worker.state != "ready" for worker in llm.pool.workers()))
            until(lambda: all(worker.state == "ready" for worker in llm.pool.workers()))
            assert tokens(StreamReader(llm.pool, *requested)) == expected
        assert RayDeployment.down(settings) is True
