"""Live pools of processes under load: workers join, drain and are replaced, and every text is that of plain decoding."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.deploy.deployment import running_processes
from paceline.deploy.processes.rollout import RolloutRun
from paceline.deploy.processes.state import StateFolder
from paceline.policy.scaling.rollout import RolloutRule
from paceline.targets.client import TargetClient
from tests.processes.target_harness import StreamReader, until
from tests.processes.test_processes import checkpoints, config, plain, requests, tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return checkpoints(tmp_path_factory.mktemp("models"))


def states(llm: TargetClient) -> dict[str, str]:
    return {row.name: row.state for row in llm.pool.workers()}


def test_pools_change_under_load(models: tuple[str, str], tmp_path: Path) -> None:
    whole = config(models, tmp_path)
    target, draft = whole.pools
    settings = replace(whole, pools=(replace(target, replicas=1), replace(draft, replicas=0)))
    folder = StateFolder.of(settings)
    submitted = requests(40)
    expected = plain(models[0], submitted)
    with (
        running_processes(settings, folder) as directory,
        TargetClient(settings, directory, start_seconds=60) as llm,
    ):
        reader = StreamReader(llm.pool, *submitted[:16])
        folder.edit(lambda state: state.scaled("target", 2).scaled("draft", 1))
        until(lambda: [states(llm).get(name) for name in ("target-0", "target-1", "draft-0")] == ["ready"] * 3)
        reader.submit(*submitted[16:32])
        started = time.monotonic()
        folder.edit(lambda state: state.without("target-0").scaled("draft", 0))
        until(lambda: [states(llm).get(name) for name in ("target-0", "draft-0")] == ["gone", "gone"])
        assert time.monotonic() - started < settings.drain_seconds + 10
        reader.submit(*submitted[32:])
        state = folder.edit(lambda state: state.with_revision(settings))
        rule = RolloutRule(start_seconds=60, drain_seconds=state.drain_seconds)
        assert RolloutRun(folder, llm.pool).run("target", state.newest, rule) == ""
        assert [(goal.name, goal.revision) for goal in folder.desired().workers] == [("target-1", state.newest)]
        assert tokens(reader) == expected
