"""Drafting state of one sequence. The scripted draft counts: after 7 it drafts 8."""

import itertools
from dataclasses import replace

import pytest

from paceline.core.request import SamplingParams
from paceline.drafting.state import MAX_IDLE_PASSES, DraftBranch, DraftedSequence, VerifyOutcome
from paceline.policy.pairing.outcomes import Outcome
from paceline.speculation.proposers.model.model_drafter import SequenceParams
from tests.processes.pools import ScriptedCore

DEPTH = 3


class Driver:
    """Runs the passes that a drafting state requests."""

    def __init__(self, outcomes=(), rule="coupled"):
        self.core = ScriptedCore(lambda ids: ids[-1] + 1)
        self.verified = []
        numbers = itertools.count(1)
        params = SequenceParams(SamplingParams(), 1, 0, 2, rule, "")
        self.state = DraftedSequence(DraftBranch(0, params, [10, 20], 2), self.core, lambda: next(numbers))
        self.outcomes = [Outcome(*outcome, 0.1) for outcome in outcomes]
        self.round = 0

    def advance(self, *tokens, depth=DEPTH):
        self.round += 1
        outcome = self.state.advance(self.round, tokens, depth)
        if outcome is not None:
            self.verified.append(outcome)

    def draft(self):
        """The draft of the round, and the number of passes that it took."""
        passes = 0
        while (branch := self.state.urgent_branch) is not None:
            self.step([branch])
            passes += 1
        assert self.state.is_due
        self.state.mark_answered()
        return [drafted.token for drafted in self.state.draft], passes

    def ahead(self, limit=100):
        for _ in range(limit):
            branches = list(self.state.branches_ahead(lambda *_: self.outcomes))
            if not branches:
                break
            self.step(branches)

    def step(self, branches):
        for branch, drafted in zip(branches, self.core.step(branches), strict=True):
            branch.append(drafted)


def test_first_round_is_drafted_on_demand():
    driver = Driver()
    driver.advance()
    assert driver.draft() == ([21, 22, 23], 3)
    assert not driver.state.was_ready


def test_full_acceptance_continues_the_main_branch():
    driver = Driver()
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 22, 23, 24)
    assert driver.state.was_ready
    assert driver.draft() == ([25, 26, 27], 0)
    assert driver.state.length == 6


def test_prepared_outcome_is_answered_at_once():
    driver = Driver([(1, 0), (2, 1)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 23)  # one accepted, then the first alternative of 22
    assert driver.draft() == ([24, 25, 26], 0)
    assert len(driver.core.open) == 1, "all other branches are closed"
    driver.ahead()
    driver.advance(24, 25, 28)  # then the second alternative of 26
    assert driver.draft() == ([29, 30, 31], 0)


def test_unprepared_outcome_is_drafted_on_demand():
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 90)
    assert not driver.state.was_ready
    assert driver.draft() == ([91, 92, 93], 3)
    assert len(driver.core.open) == 1


def test_branch_is_used_at_most_once():
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(22)
    assert driver.draft() == ([23, 24, 25], 0)
    driver.outcomes = []
    driver.advance(22)  # a round later the same outcome is not prepared
    assert driver.draft() == ([23, 24, 25], 3)


def test_incomplete_branch_is_completed():
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead(limit=2)
    driver.advance(22)
    assert not driver.state.was_ready
    assert driver.draft() == ([23, 24, 25], 1)


def test_num_ready_counts_tokens_drafted_ahead_only():
    driver = Driver([(0, 0)])
    driver.advance()
    assert driver.state.num_ready is None, "there was no answer to continue"
    driver.draft()
    driver.advance(21)  # verified without the draft: 22 and 23 are left of it
    assert driver.state.num_ready == 0
    driver.draft()
    driver.ahead(limit=2)
    driver.advance(22, 23, 24, 25)
    assert (driver.state.num_ready, driver.state.was_ready) == (1, False)
    driver.draft()
    driver.ahead()
    driver.advance(27)  # an alternative of 26
    assert (driver.state.num_ready, driver.state.was_ready) == (DEPTH, True)
    driver.draft()
    driver.ahead()
    driver.advance(90)
    assert driver.state.num_ready == 0


def test_rest_of_an_unused_draft_is_kept():
    driver = Driver()
    driver.advance()
    driver.draft()
    driver.advance(21)
    assert driver.draft() == ([22, 23, 24], 1)


def test_any_tokens_may_be_committed():
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 22, 23, 24, 25, 26, 27, 28, 29, 70, 71)
    assert driver.draft() == ([72, 73, 74], 3)
    assert driver.state.length == 13


def test_bonus_token_under_rejection_needs_a_branch():
    driver = Driver([(DEPTH, 0)], rule="rejection")
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 22, 23, 25)
    assert driver.draft() == ([26, 27, 28], 0)


def test_outcomes_are_announced_once_and_sent_once():
    """The outcome after full acceptance is not announced."""
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead(limit=1)
    assert [(key, len(drafted)) for key, drafted in driver.state.unsent_branches()] == [((0, 22), 0)]
    assert list(driver.state.unsent_branches()) == []
    driver.ahead()
    assert {key: [d.token for d in drafted] for key, drafted in driver.state.unsent_branches()} == {
        (0, 22): [23, 24, 25],
        (3, 24): [25, 26, 27],
    }
    assert list(driver.state.unsent_branches()) == []


def test_outcomes_announced_with_the_answer_are_not_announced_again():
    driver = Driver([(0, 0), (1, 0), (3, 0)])
    driver.advance()
    driver.draft()
    assert driver.state.start_branches(lambda *_: driver.outcomes) == [(0, 22), (1, 23)], (
        "the third token is not known yet"
    )
    driver.ahead(limit=1)
    assert list(driver.state.unsent_branches()) == []
    driver.ahead()
    assert {key[0] for key, _ in driver.state.unsent_branches()} == {0, 1, 3}


def test_verify_outcome_reports_acceptance_and_the_alternative():
    driver = Driver()
    for _ in range(4):
        driver.advance(*([] if driver.round == 0 else (driver.state.draft[0].token, driver.state.draft[1].token + 2)))
        driver.draft()
    assert driver.verified == [VerifyOutcome(2, 1, was_wrong=True, alternative=1, gaps=(None, None))] * 3
    driver.advance(*(drafted.token for drafted in driver.state.draft))
    assert driver.verified[3:] == [VerifyOutcome(3, 3, was_wrong=False, alternative=None, gaps=(None,) * 3)]
    driver.draft()
    driver.advance(500)
    assert driver.verified[4:] == [VerifyOutcome(1, 0, was_wrong=True, alternative=None, gaps=(None,))]


def test_gaps_of_the_drafted_tokens_reach_the_plan_and_the_outcome():
    driver, planned = Driver(), []

    def plan(*round_):
        planned.append(round_)
        return []

    driver.advance()
    driver.draft()
    chain = driver.state.draft
    driver.state.branches[0].chain[:] = [
        replace(drafted, gap=gap) for drafted, gap in zip(chain, (4.0, 0.5, None), strict=True)
    ]
    list(driver.state.branches_ahead(plan))
    list(driver.state.branches_ahead(plan))
    assert planned == [(3, DEPTH, True, [4.0, 0.5, None])], "planned once a round"
    driver.advance(chain[0].token, 500)
    assert driver.verified[0].gaps == (4.0, 0.5)


def test_round_without_tokens_is_answered_after_the_idle_limit():
    driver = Driver()
    driver.core.step = lambda branches: [None] * len(branches)
    driver.advance()
    assert driver.draft() == ([], MAX_IDLE_PASSES)


def test_drop_ahead_closes_all_branches_but_the_main_one():
    driver = Driver([(0, 0), (1, 0)])
    driver.advance()
    driver.draft()
    driver.ahead(limit=2)
    assert len(driver.core.open) == 3
    driver.state.drop_ahead()
    assert len(driver.core.open) == 1


@pytest.mark.parametrize("depth", [1, 5])
def test_depth_may_change_from_round_to_round(depth):
    driver = Driver([(0, 0)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(22, depth=depth)
    tokens, _ = driver.draft()
    assert tokens == [23 + i for i in range(depth)]


@pytest.mark.parametrize(("follows", "num_passes"), [(24, 0), (90, 3)])
def test_branch_of_an_accepted_alternative_continues(follows, num_passes):
    """The target accepted 21 and the alternative 23 of 22; the branch drafted 24 after it."""
    driver = Driver([(1, 0)])
    driver.advance()
    driver.draft()
    driver.ahead()
    driver.advance(21, 23, follows)
    assert driver.draft() == ([follows + 1, follows + 2, follows + 3], num_passes)
    assert driver.state.length == 5
    assert len(driver.core.open) == 1


def test_alternatives_are_outcomes_that_the_draft_knows():
    driver = Driver()
    driver.state.advance(1, (), DEPTH, 4)
    driver.draft()
    assert driver.state.num_alternatives == 4
    outcomes = [Outcome(0, 0, 0.3), Outcome(2, 1, 0.2), Outcome(0, 9, 0.1), Outcome(3, 0, 0.1)]
    assert driver.state.keys(outcomes) == [(0, 22), (2, 25)]


def test_rejection_has_no_alternatives():
    driver = Driver(rule="rejection")
    driver.state.advance(1, (), DEPTH, 4)
    assert driver.state.num_alternatives == 0
