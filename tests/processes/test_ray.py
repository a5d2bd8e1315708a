"""Workers as Ray actors: a pool serves and scales, and a killed worker is restarted. `test_ray_live.py` has the rest."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.deploy.ray.deployment import RayDeployment
from paceline.targets.client import TargetClient
from tests.processes.ray_cluster import ray_cluster
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import checkpoints, config, plain, requests, tokens

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


def test_a_pool_on_ray_serves(tmp_path: Path) -> None:
    models = checkpoints(tmp_path)
    submitted = requests(4, max_tokens=8)
    expected = plain(models[0], submitted)
    with ray_cluster(2) as address:
        settings = config(models, tmp_path, ray=address)
        settings = replace(settings, pools=(replace(settings.targets[0], replicas=1),))
        with TargetClient(settings, RayDeployment.up(settings), start_seconds=240) as llm:
            assert tokens(StreamReader(llm.pool, *submitted)) == expected
        assert RayDeployment.down(settings) is True


@pytest.mark.slow
def test_a_pool_on_ray_scales_and_reports_a_restart(tmp_path: Path) -> None:
    models = checkpoints(tmp_path)
    submitted = requests(8, max_tokens=24)
    expected = plain(models[0], submitted)
    with ray_cluster(2) as address:
        settings = config(models, tmp_path, ray=address)
        settings = replace(settings, pools=(replace(settings.targets[0], replicas=1),))
        with pytest.raises(PacelineError, match="not up"):
            RayDeployment.find(settings)
        deployment = RayDeployment.up(settings)
        with TargetClient(settings, deployment, start_seconds=60) as llm:

            def states() -> list[str]:
                return [row.state for row in llm.pool.workers()]

            deployment.edit(lambda state: state.scaled("target", 2))
            until(lambda: states() == ["ready", "ready"])
            reader = StreamReader(llm.pool, *submitted)
            os.kill(deployment.pids()["target-1"][0], signal.SIGKILL)
            until(lambda: [row.life.restarts for row in llm.pool.workers()] == [0, 1])
            assert [row.life.last_exit for row in llm.pool.workers()] == ["", "process lost"]
            assert tokens(reader) == expected
            until(lambda: states() == ["ready", "ready"])
            deployment.edit(lambda state: state.scaled("target", 1))
            until(lambda: states() == ["ready", "gone"])
        assert RayDeployment.down(settings) is True
        assert RayDeployment.down(settings) is False
