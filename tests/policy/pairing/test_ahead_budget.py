"""Outcomes that a draft worker has time to prepare."""

import pytest

from paceline.policy.pairing.ahead import PAUSE_SHARE, BranchBudget


def learned(base: float, per_row: float, pause: float) -> BranchBudget:
    """After passes of 1 and 8 rows in turn. They may fill `pause`."""
    budget = BranchBudget()
    for i in range(100):
        rows = 8 if i % 2 else 1
        budget.observe_pass(rows, base + per_row * rows)
        budget.observe_pause(pause / PAUSE_SHARE)
    return budget


def test_time_of_a_pass_is_fitted() -> None:
    budget = learned(0.001, 0.0002, 0.02)
    assert budget.pass_seconds(16) == pytest.approx(0.0042)
    assert budget.pass_seconds(1) == pytest.approx(0.0012)


LIKELY_FIRST = [0.2 * 0.8**i for i in range(10)]


def test_more_branches_where_rows_are_cheap_or_pauses_long() -> None:
    """A row more takes as much from the passes of all as its outcome is likely."""
    assert learned(0.001, 0.0002, 0.0201).num_branches(7, 1, LIKELY_FIRST) == 9, "seven passes of 1 + 0.2 n ms"
    assert learned(0.001, 0.0002, 0.0101).num_branches(7, 1, LIKELY_FIRST) == 5
    assert learned(0.001, 0.0010, 0.0201).num_branches(7, 1, LIKELY_FIRST) == 3


def test_drafts_of_several_sequences_are_complete() -> None:
    """Eight passes of 1 + 0.8 n ms, or four passes, within 20 ms."""
    assert learned(0.001, 0.0002, 0.0201).num_branches(7, 4, LIKELY_FIRST) == 1
    assert learned(0.001, 0.0002, 0.0201).num_branches(3, 4, LIKELY_FIRST) == 5


def test_an_unlikely_outcome_is_not_worth_its_row() -> None:
    """A row more leaves fewer passes for all: its outcome has to be likely enough."""
    budget = learned(0.001, 0.0002, 0.0141)  # seven passes of five rows
    assert budget.num_branches(7, 1, [0.2] * 5 + [0.01] * 5) == 5
    assert budget.num_branches(7, 1, [0.2] * 5 + [0.19] * 5) > 5, "incomplete drafts of more outcomes save more"


def test_free_rows_use_all_that_is_allowed() -> None:
    assert learned(0.001, 0.0, 0.02).num_branches(7, 1, LIKELY_FIRST) == 10


def test_own_continuation_is_always_drafted() -> None:
    assert learned(0.01, 0.001, 0.001).num_branches(7, 16, [0.9, 0.01, 0.01]) == 1


def test_nothing_is_limited_before_enough_was_observed() -> None:
    budget = BranchBudget()
    assert budget.num_branches(7, 16, LIKELY_FIRST) == 10
    for _ in range(100):
        budget.observe_pass(4, 1.0)
    assert budget.num_branches(7, 16, LIKELY_FIRST) == 10


def test_a_target_without_requests_changes_nothing() -> None:
    budget = learned(0.001, 0.0002, 0.0201)
    budget.observe_pause(60.0)
    assert budget.num_branches(7, 1, LIKELY_FIRST) == 9


def test_passes_of_one_size_say_nothing_about_rows() -> None:
    budget = BranchBudget()
    for _ in range(50):
        budget.observe_pass(4, 0.002)
        budget.observe_pause(0.02)
    assert budget.pass_seconds(64) == pytest.approx(0.002)
