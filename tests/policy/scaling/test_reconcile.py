from paceline.core.cluster_config import ClusterConfig
from paceline.core.pool_config import PoolConfig
from paceline.policy.scaling.desired import Actions, DesiredState, RunningWorker, WorkerGoal, next_actions

STATE = DesiredState.of(ClusterConfig((PoolConfig("t", "target", "m", replicas=2),)))
RUNNING = {"t-0": RunningWorker(0), "t-1": RunningWorker(0)}


def test_missing_workers_start_and_others_drain() -> None:
    assert next_actions(STATE, {}) == Actions(start=STATE.workers)
    assert next_actions(STATE, RUNNING) == Actions()
    assert next_actions(STATE.without("t-0"), RUNNING) == Actions(drain=("t-0",))


def test_a_worker_is_replaced_once_it_is_gone() -> None:
    goal = WorkerGoal("t-0", "t", 1)
    state = STATE.with_revision(STATE.config).with_goal(goal)
    assert next_actions(state, RUNNING) == Actions(drain=("t-0",))
    assert next_actions(state, RUNNING | {"t-0": RunningWorker(0, is_draining=True)}) == Actions()
    assert next_actions(state, {"t-1": RunningWorker(0)}) == Actions(start=(goal,))


def test_a_trial_does_not_restart_a_worker() -> None:
    state = STATE.with_goal(WorkerGoal("t-0", "t", 0, is_on_trial=True))
    assert next_actions(state, RUNNING) == Actions()
