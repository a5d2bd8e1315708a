from paceline.core.cluster_config import HealthConfig
from paceline.policy.health import (
    UNMEASURED_STEP_SECONDS,
    Backoff,
    BackoffRule,
    CanaryVote,
    StepProgress,
    WorkerHealth,
    WorkerState,
)

CONFIG = HealthConfig(heartbeat=1.0, misses=3, stall=10.0)


def test_silent_worker_is_suspected_until_its_next_heartbeat() -> None:
    health = WorkerHealth(CONFIG)
    assert health.state(0.0) is WorkerState.JOINING
    assert health.heartbeat(StepProgress(7, 0, False), 1.0) is False
    assert health.state(4.0) is WorkerState.READY
    assert health.state(4.1) is WorkerState.SUSPECTED
    assert health.heartbeat(StepProgress(7, 0, False), 5.0) is False
    assert health.state(5.0) is WorkerState.READY


def test_disconnected_worker_is_suspected_at_once() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(StepProgress(7, 0, False), 1.0)
    health.disconnected()
    assert health.state(1.0) is WorkerState.SUSPECTED
    health.heartbeat(StepProgress(7, 0, False), 1.1)
    assert health.state(1.1) is WorkerState.READY


def test_restart_is_reported_once() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(StepProgress(7, 5, True), 0.0)
    assert health.heartbeat(StepProgress(8, 0, False), 1.0) is True
    assert health.heartbeat(StepProgress(8, 0, False), 2.0) is False
    assert health.epoch == 8


def test_busy_worker_without_steps_is_suspected() -> None:
    health = WorkerHealth(CONFIG)
    for second in range(30):  # idle for long: fine
        health.heartbeat(StepProgress(1, 4, False), float(second))
    assert health.state(29.0) is WorkerState.READY
    for second in range(30, 41):  # busy at the same step
        health.heartbeat(StepProgress(1, 4, True, 0.0), float(second))
    assert health.state(40.0) is WorkerState.READY
    health.heartbeat(StepProgress(1, 4, True, 0.0), 41.0)
    assert health.state(41.0) is WorkerState.SUSPECTED
    health.heartbeat(StepProgress(1, 5, True), 42.0)
    assert health.state(42.0) is WorkerState.READY


def test_two_wrong_canaries_make_a_worker_unhealthy_until_a_right_one() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(StepProgress(1, 0, False), 0.0)
    health.canary(agrees=False)
    assert (health.state(0.0), health.is_in_doubt) == (WorkerState.READY, True)
    health.canary(agrees=False)
    assert health.state(0.0) is WorkerState.UNHEALTHY
    health.canary(agrees=True)
    assert (health.state(0.0), health.is_in_doubt) == (WorkerState.READY, False)


def test_restart_resets_wrong_canaries() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(StepProgress(1, 0, False), 0.0)
    health.canary(agrees=False)
    health.canary(agrees=False)
    health.heartbeat(StepProgress(2, 0, False), 1.0)
    assert health.state(1.0) is WorkerState.READY


RIGHT, WRONG = (1, 2, 3), (1, 2, 4)


def test_minority_result_disagrees() -> None:
    vote = CanaryVote()
    assert vote.add("a", RIGHT) == {"a": True}
    vote.add("b", RIGHT)
    assert vote.add("c", WRONG) == {"a": True, "b": True, "c": False}


def test_later_results_change_the_majority() -> None:
    vote = CanaryVote()
    vote.add("a", WRONG)
    vote.add("b", RIGHT)
    assert vote.add("c", RIGHT) == {"a": False, "b": True, "c": True}


def test_tie_keeps_the_previous_majority() -> None:
    vote = CanaryVote()
    vote.add("a", RIGHT)
    vote.add("b", RIGHT)
    assert vote.add("a", WRONG) == {"a": False, "b": True}
    assert vote.add("a", RIGHT) == {"a": True, "b": True}


def test_a_vote_says_where_a_text_leaves_the_majoritys() -> None:
    vote = CanaryVote()
    for worker, tokens in (("a", RIGHT), ("b", RIGHT), ("c", WRONG), ("d", RIGHT[:2]), ("e", (*RIGHT, 9))):
        vote.add(worker, tokens)
    assert vote.difference("a") == ""
    assert vote.difference("c") == "output token 2 is 4 in place of 3"
    assert vote.difference("d") == "output token 2 is the end in place of 3"
    assert vote.difference("e") == "output token 3 is 9 in place of the end"


def test_forgotten_result_does_not_count() -> None:
    vote = CanaryVote()
    vote.add("a", WRONG)
    vote.forget("a")
    assert vote.add("b", RIGHT) == {"b": True}


def test_backoff_doubles_up_to_its_maximum() -> None:
    backoff = Backoff(BackoffRule(first=1.0, max_delay=5.0))
    assert [backoff.delay(0.1) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert backoff.num_failures == 4


def test_backoff_resets_after_a_long_uptime() -> None:
    backoff = Backoff(BackoffRule(first=1.0, reset_after=60.0))
    backoff.delay(1.0)
    backoff.delay(1.0)
    assert backoff.delay(60.0) == 1.0
    assert backoff.delay(1.0) == 2.0


def test_a_step_may_take_its_predicted_time_and_the_first_ones_of_a_size_a_minute() -> None:
    for step_seconds, limit in ((5.0, 5.0 + CONFIG.stall), (None, UNMEASURED_STEP_SECONDS)):
        health, now = WorkerHealth(CONFIG), 0.0
        while now <= limit:
            health.heartbeat(StepProgress(1, 4, True, step_seconds), now)
            assert health.state(now) is WorkerState.READY
            now += 0.5
        health.heartbeat(StepProgress(1, 4, True, step_seconds), now)
        assert health.state(now) is WorkerState.SUSPECTED


def test_a_pause_of_the_gateway_is_no_silence_of_the_worker() -> None:
    health = WorkerHealth(CONFIG)
    health.heartbeat(StepProgress(1, 4, True, 0.0), 0.0)
    health.forgive(100.0)
    assert health.state(100.0) is WorkerState.READY
    assert health.silent_seconds(101.0) == 1.0
