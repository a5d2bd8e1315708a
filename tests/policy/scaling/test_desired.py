import pytest

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig
from paceline.policy.scaling.desired import DesiredState, WorkerGoal, free_numbers

CONFIG = ClusterConfig((PoolConfig("target", "target", "m", replicas=2), PoolConfig("draft", "draft", "d", replicas=0)))


def names(state: DesiredState) -> list[str]:
    return [goal.name for goal in state.workers]


def test_the_file_is_the_first_state() -> None:
    state = DesiredState.of(CONFIG)
    assert names(state) == ["target-0", "target-1"]
    assert state.config == CONFIG


def test_scaling_keeps_low_numbers_and_fills_gaps() -> None:
    state = DesiredState.of(CONFIG)
    assert names(state.scaled("target", 1)) == ["target-0"]
    assert names(state.scaled("draft", 2)) == ["target-0", "target-1", "draft-0", "draft-1"]
    without = state.scaled("target", 3).without("target-1")
    assert names(without) == ["target-0", "target-2"]
    assert without.config.pools[0].replicas == 2
    assert names(without.scaled("target", 3)) == ["target-0", "target-1", "target-2"]
    assert names(state.scaled("target", 12))[-1] == "target-11"


def test_impossible_changes_are_refused() -> None:
    state = DesiredState.of(CONFIG)
    with pytest.raises(InvalidConfig, match="replicas must be at least 1"):
        state.scaled("target", 0)
    with pytest.raises(InvalidConfig, match=r"no pool 'drafts'; the pools are target, draft"):
        state.scaled("drafts", 1)
    with pytest.raises(InvalidConfig, match=r"no worker 'target-7'; the workers are target-0, target-1"):
        state.without("target-7")
    with pytest.raises(InvalidConfig, match="replicas must be at least 1"):
        state.without("target-0").without("target-1")


def test_new_workers_get_the_newest_revision() -> None:
    state = DesiredState.of(CONFIG).with_revision(CONFIG)
    assert state.newest == 1
    assert state.scaled("target", 3).goal("target-2") == WorkerGoal("target-2", "target", 1)
    assert state.scaled("target", 3).goal("target-0") == WorkerGoal("target-0", "target", 0)


def test_unused_revisions_are_dropped() -> None:
    state = DesiredState.of(CONFIG).with_revision(CONFIG)
    moved = state.with_goal(WorkerGoal("target-0", "target", 1))
    assert set(moved.settled(1).revisions) == {0, 1}
    assert set(moved.with_goal(WorkerGoal("target-1", "target", 1)).settled(1).revisions) == {1}
    assert set(state.without_revision(1).revisions) == {0}
    assert moved.without_revision(1) == moved  # a worker still has it


def test_free_numbers() -> None:
    goals = [WorkerGoal(f"p-{number}", "p") for number in (0, 2, 3)]
    assert free_numbers(goals, 3) == [1, 4, 5]
    assert free_numbers((), 0) == []
