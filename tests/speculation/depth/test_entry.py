"""What a beginning costs: the steps in which a draft catches up, as far as they are longer than those that follow."""

from typing import Any

import pytest

from paceline.speculation.depth.policy import DraftingObservation, RoundObservation, StepObservation
from paceline.speculation.depth.start_costs import SwitchOnCost

PLAIN, USUAL = 0.010, 0.012


def step(requested: int = 0, seconds: float = USUAL, behind: int = 0, **told: Any) -> StepObservation:
    """`requested` sequences of eight draft one token, but for those whose draft is still `behind`."""
    return StepObservation(
        **{
            "batch": 8,
            "rows": 8 + requested,
            "prefill_rows": 0,
            "drafting": (DraftingObservation("draft", 1, seconds - PLAIN),) if requested else (),
            "verify_seconds": PLAIN,
            "network_seconds": 0.0,
            "rounds": tuple(RoundObservation(i, "draft/chat", int(i >= behind), 0, 1) for i in range(requested)),
            **told,
        }
    )


def begun(*steps: StepObservation) -> SwitchOnCost:
    entry = SwitchOnCost()
    for one in steps:
        entry.observe(one, USUAL)
    return entry


def caught_up(seconds: float) -> list[StepObservation]:
    """A beginning after many plain steps, and the step that shows it over."""
    return [*[step()] * 10, step(8, seconds, is_timed=False), step(8)]


def test_costs_nothing_that_anybody_knows_of_at_first() -> None:
    assert SwitchOnCost().seconds(8) == 0.0


def test_every_step_until_the_draft_is_up_to_date_counts() -> None:
    entry = begun(step(8, 0.052, behind=1, is_timed=False), step(8, 0.052, is_timed=False), step(8))
    assert entry.seconds(8) == pytest.approx(0.080)
    assert entry.seconds(2) == pytest.approx(0.020)


def test_a_beginning_that_is_given_up_counts_as_far_as_it_came() -> None:
    assert begun(step(4, 0.052, behind=1, is_timed=False), step()).seconds(8) == pytest.approx(0.040)


def test_a_few_that_draft_send_the_whole_batch_the_slower_way() -> None:
    assert begun(step(2, 0.052, is_timed=False), step(2)).seconds(8) == begun(*caught_up(0.052)).seconds(8)


def test_going_on_after_a_plain_step_is_no_beginning() -> None:
    entry = begun(step(8, 0.052, is_timed=False), step(8), step(), step(8, is_timed=False), step(8))
    assert entry.seconds(8) == pytest.approx(0.040)


def test_after_many_plain_steps_it_is() -> None:
    assert begun(*caught_up(0.172), *caught_up(0.052)).seconds(8) == pytest.approx(0.040)


def test_a_pause_that_befalls_one_beginning_is_outvoted() -> None:
    assert begun(*caught_up(0.052), *caught_up(2.0), *caught_up(0.062)).seconds(8) == pytest.approx(0.050)
    assert begun(*caught_up(2.0), *caught_up(0.052)).seconds(8) == pytest.approx(0.040)


def test_beginnings_that_become_dearer_are_believed() -> None:
    entry = begun(*caught_up(0.052), *caught_up(0.172), *caught_up(0.172))
    assert entry.seconds(8) == pytest.approx(0.160)


def test_steps_that_go_on_without_a_time_are_no_beginning() -> None:
    entry = begun(step(8, 0.052, is_timed=False), *[step(8, 0.022, is_timed=False)] * 200, step())
    assert entry.seconds(8) == pytest.approx(0.040)


def test_steps_with_prompts_tell_nothing() -> None:
    assert begun(step(8, 0.9, is_timed=False, prefill_rows=500), step(8)).seconds(8) == 0.0


def test_where_no_cost_is_known_nothing_is_learned() -> None:
    entry = SwitchOnCost()
    entry.observe(step(8, 0.9), None)
    assert entry.seconds(8) == 0.0
