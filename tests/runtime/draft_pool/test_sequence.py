"""One sequence as a target sees it: what it tells a draft worker, and what it makes of what comes back."""

from dataclasses import dataclass, field
from typing import cast

import pytest
from paceline.runtime.draft_worker.packed_branches import pack

from paceline.cluster.pairing.pairing import RoundTrip
from paceline.core.sampling import SamplingParams
from paceline.runtime.draft_pool.connection import DraftConnection, DraftCounters
from paceline.runtime.draft_pool.sequence import PoolRider
from paceline.runtime.wire.messages import Load, RoundDraft, SequenceBranches
from paceline.speculation.proposer import Progress

OFFERED = [11, 12, 13]


@dataclass
class FakeLink:
    version: int = 3
    epoch: int = 1
    counts: DraftCounters = field(default_factory=DraftCounters)
    round_trip: RoundTrip = field(default_factory=RoundTrip)
    load: Load = field(default_factory=Load)
    faults: list[str] = field(default_factory=list)

    def good(self) -> None: ...

    def timed(self, *_: object) -> None: ...

    def fault(self, what: str) -> None:
        self.faults.append(what)


class Seat:
    """A rider, and the engine around it."""

    def __init__(self, version: int = 3) -> None:
        self.ids = [1, 2]
        self.link = FakeLink(version)
        progress = Progress(7, self.ids, 3, SamplingParams(temperature=0.0), 1, 0, 1, "coupled")
        self.rider = PoolRider(progress, 1000)
        self.rider.open_at(cast(DraftConnection, self.link))

    def ask(self, *committed: int):
        self.ids += committed
        self.rider.asked, self.rider.chain = 0, None  # as `observe` does
        return self.rider.ask(3, 0.0)

    def answer(self, tokens=OFFERED, begun=()):
        self.rider.take(RoundDraft(7, self.rider.round, list(tokens), b"", False, list(begun)), 0.0, True)
        self.offer()

    def offer(self):
        """As `collect` does."""
        self.rider.offered = self.rider.chain.tokens
        self.rider.asked, self.rider.chain = 0, None

    def sent(self, *branches):
        for ahead in pack(7, self.rider.round, branches):
            self.rider.take_ahead(ahead)


@pytest.mark.parametrize(
    ("committed", "kept", "tokens"),
    [([11, 12, 99], 2, [99]), ([11, 12, 13, 14], 3, [14]), ([99], 0, [99]), ([11, 99, 98], 0, [11, 99, 98])],
)
def test_a_worker_is_not_sent_back_what_it_answered(committed, kept, tokens):
    """Unless what was committed is no outcome of that round."""
    seat = Seat()
    seat.ask()
    seat.answer()
    step = seat.ask(*committed)
    assert (step.kept, step.tokens, step.base) == (kept, tokens, 2)
    assert seat.rider.known == 2 + len(committed)


def test_an_older_worker_is_sent_everything():
    seat = Seat(version=2)
    seat.ask()
    seat.answer()
    step = seat.ask(11, 12, 99)
    assert (step.kept, step.tokens) == (0, [11, 12, 99])


def test_a_draft_that_was_sent_ahead_is_told_in_full():
    """The worker may have given it up meanwhile, and drafted another."""
    seat = Seat()
    seat.ask()
    seat.answer()
    seat.sent(((1, 50), [51, 52, 53]))
    step = seat.ask(11, 50)
    assert (step.held, step.kept, step.tokens) == (3, 1, [50])
    seat.offer()
    step = seat.ask(51, 52, 60)
    assert (step.held, step.kept, step.tokens) == (0, 0, [51, 52, 60])


@pytest.mark.parametrize(
    ("committed", "is_missed"), [([11, 50], False), ([11, 51], True), ([50], True), ([*OFFERED, 77], False)]
)
def test_what_is_being_drafted_is_known_from_the_answer(committed, is_missed):
    """And what follows after all was accepted is always being drafted."""
    seat = Seat()
    seat.ask()
    seat.answer(begun=[1, 50])
    seat.ask(*committed)
    assert seat.rider.is_missed == is_missed


@pytest.mark.parametrize(("committed", "is_missed", "held"), [([11], False, 2), ([50], False, 0), ([60], True, 0)])
def test_an_answer_that_came_late_says_what_is_drafted_all_the_same(committed, is_missed, held):
    """Its round was verified without it: its first token, or one that is being prepared for, may be what was chosen."""
    seat = Seat()
    seat.ask()
    seat.rider.asked = 0
    seat.rider.take(RoundDraft(7, 1, OFFERED, b"", False, [0, 50, 1, 51]), 0.0, True)
    step = seat.ask(*committed)
    assert (seat.rider.is_missed, step.held, step.kept, step.tokens) == (is_missed, held, 0, committed)


def test_branches_that_are_none_count_against_the_worker():
    seat = Seat()
    seat.ask()
    seat.answer()
    seat.rider.take_ahead(SequenceBranches(7, seat.rider.round, [], b"nonsense", 3))
    assert len(seat.link.faults) == 1
    assert not seat.rider.branches
