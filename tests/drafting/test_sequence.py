"""One sequence of the proposer `pool`: its requests to a draft worker, and the drafts it uses."""

from dataclasses import dataclass, field
from typing import cast

import pytest

from paceline.core.request import SamplingParams
from paceline.drafting.branches import BranchKey, pack
from paceline.drafting.connection import DraftConnection, DraftCounters
from paceline.drafting.sequence import PoolSequence
from paceline.policy.pairing.pairing import RoundTrip
from paceline.speculation.proposer import SequenceProgress
from paceline.wire.draft_messages import Load, RoundDraft, SequenceBranches

OFFERED = [11, 12, 13]


@dataclass
class FakeConnection:
    epoch: int = 1
    counters: DraftCounters = field(default_factory=DraftCounters)
    round_trip: RoundTrip = field(default_factory=RoundTrip)
    load: Load = field(default_factory=Load)
    faults: list[str] = field(default_factory=list)

    def record_success(self) -> None: ...

    def observe_round_trip(self, *_: object) -> None: ...

    def record_fault(self, what: str) -> None:
        self.faults.append(what)


class Driver:
    """Calls a sequence as the proposer does."""

    def __init__(self) -> None:
        self.ids = [1, 2]
        self.connection = FakeConnection()
        progress = SequenceProgress(7, self.ids, 3, SamplingParams(temperature=0.0, stop=("x",)), 1, 0, 1, "coupled")
        self.sequence = PoolSequence(progress, 1000)
        self.opened = self.sequence.open_at(cast(DraftConnection, self.connection))

    def start_round(self, *committed: int, num_alternatives: int = 0):
        self.ids += committed
        self.sequence.requested, self.sequence.chain = 0, None  # as `observe` does
        return self.sequence.start_round(3, 0.0, num_alternatives)

    def answer(self, tokens=OFFERED, started=(), alternatives=()):
        draft = RoundDraft(7, self.sequence.round, list(tokens), b"", False, list(started), list(alternatives))
        self.sequence.receive_draft(draft, 0.0, True)
        self.use_draft()

    def use_draft(self):
        """As `collect` does."""
        self.sequence.offered, self.sequence.offered_alternatives = self.sequence.chain[0], self.sequence.chain[2]
        self.sequence.requested, self.sequence.chain = 0, None

    def receive(self, *branches):
        for record in pack(7, self.sequence.round, branches):
            self.sequence.receive_branches(record)


def test_open_message_omits_parameters_that_drafting_does_not_use():
    opened = Driver().opened
    assert (opened.sequence, opened.ids, opened.rule) == (7, [1, 2], "coupled")
    assert opened.sampling == SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("committed", "num_kept", "tokens"),
    [([11, 12, 99], 2, [99]), ([11, 12, 13, 14], 3, [14]), ([99], 0, [99]), ([11, 99, 98], 0, [11, 99, 98])],
)
def test_tokens_of_the_worker_are_not_sent_back(committed, num_kept, tokens):
    """Unless the committed tokens are no outcome of the round."""
    driver = Driver()
    driver.start_round()
    driver.answer()
    request = driver.start_round(*committed)
    assert (request.num_kept, request.tokens, request.base) == (num_kept, tokens, 2)
    assert driver.sequence.num_sent == 2 + len(committed)


def test_tokens_of_a_branch_are_sent_back():
    """The worker may have dropped the branch and drafted other tokens."""
    driver = Driver()
    driver.start_round()
    driver.answer()
    driver.receive((BranchKey(1, 50), [51, 52, 53]))
    request = driver.start_round(11, 50)
    assert (request.num_held, request.num_kept, request.tokens) == (3, 1, [50])
    driver.use_draft()
    request = driver.start_round(51, 52, 60)
    assert (request.num_held, request.num_kept, request.tokens) == (0, 0, [51, 52, 60])


@pytest.mark.parametrize(
    ("committed", "is_unprepared"), [([11, 50], False), ([11, 51], True), ([50], True), ([*OFFERED, 77], False)]
)
def test_answer_shows_which_outcomes_are_prepared(committed, is_unprepared):
    """The worker always prepares the outcome after full acceptance."""
    driver = Driver()
    driver.start_round()
    driver.answer(started=[1, 50])
    driver.start_round(*committed)
    assert driver.sequence.is_unprepared == is_unprepared


@pytest.mark.parametrize(
    ("committed", "is_unprepared", "num_held"), [([11], False, 2), ([50], False, 0), ([60], True, 0)]
)
def test_late_answer_is_used_for_the_next_round(committed, is_unprepared, num_held):
    """The committed token may be the first token of the late draft, or one that the worker prepares."""
    driver = Driver()
    driver.start_round()
    driver.sequence.requested = 0
    driver.sequence.receive_draft(RoundDraft(7, 1, OFFERED, b"", False, [0, 50, 1, 51]), 0.0, True)
    request = driver.start_round(*committed)
    assert (driver.sequence.is_unprepared, request.num_held) == (is_unprepared, num_held)
    assert (request.num_kept, request.tokens) == (0, committed)


def test_malformed_branches_are_a_fault_of_the_worker():
    driver = Driver()
    driver.start_round()
    driver.answer()
    driver.sequence.receive_branches(SequenceBranches(7, driver.sequence.round, b"nonsense", 3))
    assert len(driver.connection.faults) == 1
    assert not driver.sequence.branches


def test_alternatives_are_requested_and_offered():
    driver = Driver()
    assert driver.start_round(num_alternatives=2).num_alternatives == 2
    driver.answer(alternatives=[0, 50, 1, 60])
    assert driver.sequence.offered_alternatives == (BranchKey(0, 50), BranchKey(1, 60))
    request = driver.start_round(11, 60, 70)  # the second was accepted
    assert (request.num_kept, request.tokens, request.num_alternatives) == (0, [11, 60, 70], 0)
    assert driver.sequence.offered_alternatives == ()


@pytest.mark.parametrize(("committed", "num_held"), [([50, 51], 2), ([50, 52], 0), ([11, 60, 61], 0), ([50], 3)])
def test_branch_after_an_accepted_alternative_is_used(committed, num_held):
    """If it foresaw the token after the alternative."""
    driver = Driver()
    driver.start_round(num_alternatives=1)
    driver.answer(alternatives=[0, 50])
    driver.receive((BranchKey(0, 50), [51, 52, 53]), (BranchKey(1, 60), [61, 62, 63]))
    assert driver.start_round(*committed).num_held == num_held


def test_alternatives_of_a_branch_may_follow_it():
    driver = Driver()
    driver.start_round()
    driver.answer()
    driver.receive((BranchKey(1, 50), [51, 52, 53]))
    driver.start_round(11, 50, num_alternatives=1)
    driver.sequence.receive_draft(RoundDraft(7, 2, [51, 52, 53], alternatives=[2, 70]), 0.0, True)
    assert driver.sequence.chain is not None
    assert driver.sequence.chain.alternatives == (BranchKey(2, 70),)
    driver.use_draft()
    driver.sequence.receive_draft(RoundDraft(7, 2, [51, 52, 53], alternatives=[2, 70]), 0.0, True)  # too late
    assert driver.connection.counters.late == 0


@pytest.mark.parametrize(
    "alternatives", [[0, 50, 1], [0, 11], [3, 50], [0, 1000], [0, 50, 0, 50], [0, 50, 1, 51, 2, 52]]
)
def test_invalid_alternatives_are_a_fault_of_the_worker(alternatives):
    driver = Driver()
    driver.start_round(num_alternatives=2)
    driver.sequence.receive_draft(RoundDraft(7, 1, OFFERED, alternatives=alternatives), 0.0, True)
    assert len(driver.connection.faults) == 1
    assert driver.sequence.chain is None
