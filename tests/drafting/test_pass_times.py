"""Times of passes, and the delay by a pass ahead."""

import pytest

from paceline.drafting.scheduler import DraftPassTimes


def test_the_average_moves_by_a_tenth() -> None:
    times = DraftPassTimes()
    assert times.average == 0.0
    times.observe(1.0, is_urgent=True)
    assert times.average == 1.0
    times.observe(2.0, is_urgent=False)
    assert times.average == pytest.approx(1.1)


def test_a_pass_ahead_delays_the_next_messages_by_half_of_it() -> None:
    times = DraftPassTimes()
    times.observe(3.0, is_urgent=False)
    assert times.ahead_delay == 0.0  # the time of an urgent pass is not known
    times.observe(2.0, is_urgent=True)
    assert times.ahead_delay == pytest.approx(0.5 * 3.0 / 2.0)
    times.start_iteration()
    assert times.ahead_delay == 0.0


def test_an_urgent_pass_delays_no_message() -> None:
    times = DraftPassTimes()
    times.observe(2.0, is_urgent=True)
    assert times.ahead_delay == 0.0
