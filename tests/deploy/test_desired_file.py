"""The desired state as a file: written whole, edited by several commands, read when it changed."""

import threading
from pathlib import Path

import pytest

from paceline.core.cluster_config import cluster_config
from paceline.core.errors import PacelineError
from paceline.deploy.processes.state import DesiredFile
from paceline.policy.scaling.desired import DesiredState, WorkerGoal

POOLS = [
    {"name": "target", "role": "target", "model": "m", "limits": {"kv_tokens": 64}, "speculation": {"max_depth": 3}},
    {"name": "draft", "role": "draft", "model": "d", "replicas": 0, "placement": {"with": "target"}},
]
CONFIG = cluster_config({"pools": POOLS, "gateway": {"port": 0}, "health": {"canary": 2.0}})


def test_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = DesiredFile(tmp_path)
    state = (
        DesiredState.of(CONFIG).with_revision(CONFIG).with_goal(WorkerGoal("target-3", "target", 1, is_on_trial=True))
    )
    file.write(state)
    assert file.read() == state
    assert file.read_if_changed() == state
    assert file.read_if_changed() is None
    file.edit(lambda one: one.scaled("draft", 1))
    changed = file.read_if_changed()
    assert changed is not None
    assert changed.goal("draft-0") == WorkerGoal("draft-0", "draft", 1)


def test_edits_at_the_same_time_are_all_made(tmp_path: Path) -> None:
    DesiredFile(tmp_path).write(DesiredState.of(CONFIG))

    def add(number: int) -> None:
        DesiredFile(tmp_path).edit(lambda state: state.with_goal(WorkerGoal(f"target-{number}", "target")))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(DesiredFile(tmp_path).read().workers) == 9


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    assert DesiredFile(tmp_path).read_if_changed() is None
    (tmp_path / "desired.json").write_text("{")
    with pytest.raises(PacelineError, match="cannot be read"):
        DesiredFile(tmp_path).read()
