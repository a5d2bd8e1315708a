"""Steps without a decision, by the time that decisions take."""

from paceline.vllm.decisions import MAX_STEPS, SHARE, Pause

ONE_EACH = [[5], [7]]


def paused(cost: float, seconds: float = 0.01) -> Pause:
    pause = Pause()
    pause.begin(2)
    pause.add_cost(cost, seconds)
    return pause


def test_a_decision_is_paid_back_by_the_steps_after_it() -> None:
    pause = paused(cost=4.5 * SHARE * 0.01)
    assert [pause.covers(ONE_EACH, 0.01) for _ in range(6)] == [True] * 4 + [False] * 2


def test_one_slow_decision_pauses_for_a_limited_number_of_steps() -> None:
    pause = paused(cost=100.0)
    assert [pause.covers(ONE_EACH, 0.01) for _ in range(2 * MAX_STEPS)].count(True) <= MAX_STEPS


def test_rows_that_change_are_observed() -> None:
    pause = paused(cost=100.0)
    assert not pause.covers([[5]], 0.01)
    assert not pause.covers([[5], []], 0.01)
    assert not pause.covers([[5], [7, 8]], 0.01)
    assert pause.covers(ONE_EACH, 0.01)


def test_nothing_is_left_out_while_the_policy_decides() -> None:
    pause = paused(cost=100.0)
    pause.end()
    assert not pause.covers(ONE_EACH, 0.01)
