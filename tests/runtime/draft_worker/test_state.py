"""One sequence at a draft worker. The scripted draft counts: after ..., 7 comes 8."""

import itertools

import pytest

from paceline.cluster.pairing.fanout import Outcome
from paceline.core.sampling import SamplingParams
from paceline.runtime.draft_worker.core import Facts, Ride
from paceline.runtime.draft_worker.state import PATIENCE, Lesson, Rolling
from tests.runtime.pools import ScriptedCore

DEPTH = 3


class Table:
    """A rolling sequence, and passes over whatever it wants."""

    def __init__(self, outcomes=(), rule="coupled"):
        self.core = ScriptedCore(lambda ids: ids[-1] + 1)
        self.lessons = []
        numbers = itertools.count(1)
        facts = Facts(SamplingParams(), 1, 0, 2, rule, "")
        self.rolling = Rolling(Ride(0, facts, [10, 20], 2), self.core, lambda: next(numbers))
        self.outcomes = [Outcome(*outcome, 0.1) for outcome in outcomes]
        self.round = 0

    def advance(self, *tokens, depth=DEPTH):
        self.round += 1
        lesson = self.rolling.advance(self.round, tokens, depth)
        if lesson is not None:
            self.lessons.append(lesson)

    def draft(self):
        """The round's draft, made if it must be; and how many passes that took."""
        passes = 0
        while (line := self.rolling.urgent) is not None:
            self.step([line])
            passes += 1
        assert self.rolling.is_due
        self.rolling.answered()
        return [drawn.token for drawn in self.rolling.draft], passes

    def ahead(self, limit=100):
        for _ in range(limit):
            lines = list(self.rolling.ahead(lambda *_: self.outcomes))
            if not lines:
                break
            self.step(lines)

    def step(self, lines):
        for line, drawn in zip(lines, self.core.step([line.ride for line in lines]), strict=True):
            line.append(drawn)


def test_a_first_round_is_drafted_afresh():
    table = Table()
    table.advance()
    assert table.draft() == ([21, 22, 23], 3)
    assert not table.rolling.was_ready


def test_full_acceptance_continues_the_chain():
    table = Table()
    table.advance()
    table.draft()
    table.ahead()
    table.advance(21, 22, 23, 24)
    assert table.rolling.was_ready
    assert table.draft() == ([25, 26, 27], 0)
    assert table.rolling.length == 6


def test_a_rival_that_was_prepared_for_is_answered_at_once():
    table = Table([(1, 0), (2, 1)])
    table.advance()
    table.draft()
    table.ahead()
    table.advance(21, 23)  # one accepted, then 22's first rival
    assert table.draft() == ([24, 25, 26], 0)
    assert len(table.core.open) == 1, "all that did not come true is closed"
    table.ahead()
    table.advance(24, 25, 28)  # then the second rival of 26
    assert table.draft() == ([29, 30, 31], 0)


def test_an_outcome_that_nobody_foresaw_is_drafted_at_once():
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead()
    table.advance(21, 90)
    assert not table.rolling.was_ready
    assert table.draft() == ([91, 92, 93], 3)
    assert len(table.core.open) == 1


def test_a_branch_is_used_at_most_once():
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead()
    table.advance(22)
    assert table.draft() == ([23, 24, 25], 0)
    table.outcomes = []
    table.advance(22)  # the same outcome a round later was not prepared for
    assert table.draft() == ([23, 24, 25], 3)


def test_a_branch_half_done_is_finished_first():
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead(limit=2)
    table.advance(22)
    assert not table.rolling.was_ready
    assert table.draft() == ([23, 24, 25], 1)


def test_it_counts_what_was_drafted_ahead_and_not_what_was_left_over():
    table = Table([(0, 0)])
    table.advance()
    assert table.rolling.there is None, "there was nothing to draft on from"
    table.draft()
    table.advance(21)  # the target went on alone: 22 and 23 are left of what was asked for
    assert table.rolling.there == 0
    table.draft()
    table.ahead(limit=2)
    table.advance(22, 23, 24, 25)
    assert (table.rolling.there, table.rolling.was_ready) == (1, False)
    table.draft()
    table.ahead()
    table.advance(27)  # a rival of 26
    assert (table.rolling.there, table.rolling.was_ready) == (DEPTH, True)
    table.draft()
    table.ahead()
    table.advance(90)
    assert table.rolling.there == 0


def test_a_target_that_went_on_alone_still_finds_the_rest_of_the_chain():
    table = Table()
    table.advance()
    table.draft()
    table.advance(21)
    assert table.draft() == ([22, 23, 24], 1)


def test_the_target_may_have_committed_anything():
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead()
    table.advance(21, 22, 23, 24, 25, 26, 27, 28, 29, 70, 71)
    assert table.draft() == ([72, 73, 74], 3)
    assert table.rolling.length == 13


def test_under_rejection_the_bonus_is_not_the_chains_own():
    table = Table([(DEPTH, 0)], rule="rejection")
    table.advance()
    table.draft()
    table.ahead()
    table.advance(21, 22, 23, 25)
    assert table.draft() == ([26, 27, 28], 0)


def test_outcomes_are_announced_and_then_delivered_each_once():
    """But for what follows after all was accepted: that is only delivered."""
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead(limit=1)
    assert [(key, len(drawn)) for key, drawn in table.rolling.prepared()] == [((0, 22), 0)]
    assert list(table.rolling.prepared()) == []
    table.ahead()
    assert {key: [d.token for d in drawn] for key, drawn in table.rolling.prepared()} == {
        (0, 22): [23, 24, 25],
        (3, 24): [25, 26, 27],
    }
    assert list(table.rolling.prepared()) == []


def test_what_is_told_with_the_answer_is_not_announced_again():
    table = Table([(0, 0), (1, 0), (3, 0)])
    table.advance()
    table.draft()
    assert table.rolling.begun(lambda *_: table.outcomes) == [(0, 22), (1, 23)], "of the third nothing is known yet"
    table.ahead(limit=1)
    assert list(table.rolling.prepared()) == []
    table.ahead()
    assert {key[0] for key, _ in table.rolling.prepared()} == {0, 1, 3}


def test_it_tells_how_often_the_draft_is_right_and_which_rival_is():
    table = Table()
    for _ in range(4):
        table.advance(*([] if table.round == 0 else (table.rolling.draft[0].token, table.rolling.draft[1].token + 2)))
        table.draft()
    assert table.lessons == [Lesson(known=2, accepted=1, was_wrong=True, rival=1)] * 3
    table.advance(*(drawn.token for drawn in table.rolling.draft))
    assert table.lessons[3:] == [Lesson(known=3, accepted=3, was_wrong=False, rival=None)]
    table.draft()
    table.advance(500)
    assert table.lessons[4:] == [Lesson(known=1, accepted=0, was_wrong=True, rival=None)]


def test_without_room_a_round_is_given_up():
    table = Table()
    table.core.step = lambda rides: [None] * len(rides)
    table.advance()
    assert table.draft() == ([], PATIENCE)


def test_shedding_gives_up_what_is_ahead():
    table = Table([(0, 0), (1, 0)])
    table.advance()
    table.draft()
    table.ahead(limit=2)
    assert len(table.core.open) == 3
    table.rolling.shed()
    assert len(table.core.open) == 1


@pytest.mark.parametrize("depth", [1, 5])
def test_depth_may_change_from_round_to_round(depth):
    table = Table([(0, 0)])
    table.advance()
    table.draft()
    table.ahead()
    table.advance(22, depth=depth)
    tokens, _ = table.draft()
    assert tokens == [23 + i for i in range(depth)]
