"""When the next graph step is submitted."""

import pytest

from paceline.engine.graph.scheduler import LEAD_SECONDS, LEAD_SHARE, RECENT_STEPS, SubmitPacer

DECODE, DRAFTS = (8, 0), (8, 4)


@pytest.fixture
def pacer() -> SubmitPacer:
    pacer = SubmitPacer()
    pacer.observe_step(DECODE, 0.010)
    pacer.observe_submit(False, 0.001)
    return pacer


def test_leaves_a_part_of_the_running_step(pacer: SubmitPacer) -> None:
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=False) == pytest.approx(0.010 * (1 - LEAD_SHARE))
    assert pacer.seconds_to_spare(DECODE, 0.004, has_prompts=False) == pytest.approx(0.010 * (1 - LEAD_SHARE) - 0.004)


def test_leaves_the_time_of_the_longest_submit(pacer: SubmitPacer) -> None:
    pacer.observe_submit(False, 0.006)
    pacer.observe_submit(False, 0.001)
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=False) == pytest.approx(0.004 - LEAD_SECONDS)


def test_a_step_that_is_nearly_over_leaves_nothing(pacer: SubmitPacer) -> None:
    assert pacer.seconds_to_spare(DECODE, 0.0095, has_prompts=False) == 0.0


def test_nothing_to_spare_before_step_and_submit_are_known(pacer: SubmitPacer) -> None:
    assert pacer.seconds_to_spare(DRAFTS, 0.0, has_prompts=False) == 0.0
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=True) == 0.0
    pacer.observe_submit(True, 0.002)
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=True) > 0.0


def test_expects_the_shortest_of_recent_steps(pacer: SubmitPacer) -> None:
    pacer.observe_step(DECODE, 0.020)
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=False) == pytest.approx(0.010 * (1 - LEAD_SHARE))
    for _ in range(RECENT_STEPS):
        pacer.observe_step(DECODE, 0.020)
    assert pacer.seconds_to_spare(DECODE, 0.0, has_prompts=False) == pytest.approx(0.020 * (1 - LEAD_SHARE))
