from paceline.cluster.health.health import Progress, WorkerHealth, WorkerState
from paceline.core.cluster_config import HealthConfig

CONFIG = HealthConfig(heartbeat=1.0, misses=3, stall=10.0)


def test_silence_is_suspected_and_a_word_is_enough_to_return() -> None:
    health = WorkerHealth(CONFIG)
    assert health.state(0.0) is WorkerState.STARTING
    assert health.heartbeat(Progress(7, 0, False), 1.0) is False
    assert health.state(4.0) is WorkerState.READY
    assert health.state(4.1) is WorkerState.SUSPECTED
    assert health.heartbeat(Progress(7, 0, False), 5.0) is False
    assert health.state(5.0) is WorkerState.READY


def test_a_broken_connection_is_not_waited_for() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(Progress(7, 0, False), 1.0)
    health.disconnected()
    assert health.state(1.0) is WorkerState.SUSPECTED
    health.heartbeat(Progress(7, 0, False), 1.1)
    assert health.state(1.1) is WorkerState.READY


def test_another_epoch_is_told_once() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(Progress(7, 5, True), 0.0)
    assert health.heartbeat(Progress(8, 0, False), 1.0) is True
    assert health.heartbeat(Progress(8, 0, False), 2.0) is False
    assert health.epoch == 8


def test_work_without_steps_is_stuck() -> None:
    health = WorkerHealth(CONFIG)
    for second in range(30):  # idle for long: fine
        health.heartbeat(Progress(1, 4, False), float(second))
    assert health.state(29.0) is WorkerState.READY
    for second in range(30, 41):  # busy at the same step
        health.heartbeat(Progress(1, 4, True), float(second))
    assert health.state(40.0) is WorkerState.READY
    health.heartbeat(Progress(1, 4, True), 41.0)
    assert health.state(41.0) is WorkerState.SUSPECTED
    health.heartbeat(Progress(1, 5, True), 42.0)
    assert health.state(42.0) is WorkerState.READY


def test_two_wrong_canaries_make_it_unhealthy_and_a_right_one_heals() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(Progress(1, 0, False), 0.0)
    health.canary(agrees=False)
    assert (health.state(0.0), health.in_doubt) == (WorkerState.READY, True)
    health.canary(agrees=False)
    assert health.state(0.0) is WorkerState.UNHEALTHY
    health.canary(agrees=True)
    assert (health.state(0.0), health.in_doubt) == (WorkerState.READY, False)


def test_a_restart_wipes_the_slate() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(Progress(1, 0, False), 0.0)
    health.canary(agrees=False)
    health.canary(agrees=False)
    health.heartbeat(Progress(2, 0, False), 1.0)
    assert health.state(1.0) is WorkerState.READY
