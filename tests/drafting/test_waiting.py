"""The wait for drafts: until they arrive, the deadline passes, or they are not worth it."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from paceline.core.clock import VirtualClock
from paceline.drafting.drafts import DraftChain
from paceline.drafting.proposer import IDLE_WAIT_SECONDS, DraftWait, PoolInbox
from paceline.drafting.sequence import PoolSequence
from paceline.drafting.trial import PoolDrafts
from tests.drafting.fakes import FakeConnection, FakeConnections, progress


class Case:
    """One sequence with a requested draft. `arrive` is called in every wait."""

    def __init__(self) -> None:
        self.clock, self.connection, self.pool_drafts = VirtualClock(100.0), FakeConnection(), PoolDrafts()
        self.waits: list[float] = []
        self.arrive: Callable[[], None] = lambda: None
        connections = FakeConnections(self.connection).as_connections()
        self.waiting = DraftWait(cast(PoolInbox, self), connections, self.pool_drafts, self.clock)
        self.sequence = PoolSequence(progress(7), 1000)
        self.sequence.open_at(self.connection.as_connection())
        self.sequence.start_round(3, 100.0)

    def wait(self, transports: Iterable[Any], seconds: float) -> None:
        """In place of the inbox: the time passes, then messages arrive."""
        assert list(transports) == [self.connection]
        self.waits.append(seconds)
        self.clock.advance(seconds)
        self.arrive()


def test_a_wait_ends_when_the_draft_has_arrived() -> None:
    case = Case()
    case.arrive = lambda: setattr(case.sequence, "chain", DraftChain((3,), ()))
    case.waiting.wait([case.sequence], 101.0)
    assert case.waits == [1.0]  # the time of an answer is not known yet: until the deadline


def test_a_wait_ends_at_the_deadline() -> None:
    case = Case()
    case.waiting.wait([case.sequence], 100.5)
    assert case.waits == [0.5]


def test_there_is_no_wait_for_a_silent_worker() -> None:
    case = Case()
    case.connection.silent = True
    case.waiting.wait([case.sequence], 101.0)
    assert case.waits == []


def test_there_is_no_wait_for_drafts_that_cost_more_than_they_gain() -> None:
    case = Case()
    case.pool_drafts.observe_step(0.25)  # one more token a step is worth a wait of one step
    case.waiting.wait([case.sequence], 100.5)
    assert case.waits == []


def test_without_missing_drafts_only_a_ping_is_waited_for() -> None:
    case = Case()
    case.sequence.chain = DraftChain((3,), ())
    case.waiting.wait([case.sequence], 101.0)
    assert case.waits == []
    case.connection.needs_ping = True
    case.arrive = lambda: setattr(case.connection, "needs_ping", False)
    case.waiting.wait([case.sequence], 101.0)
    assert case.waits == [1.0]


def test_an_idle_target_waits_a_moment_for_a_ping() -> None:
    case = Case()
    case.waiting.wait_idle(100.0)
    assert case.waits == []
    case.connection.needs_ping = True
    case.waiting.wait_idle(100.0)
    assert case.waits == [IDLE_WAIT_SECONDS]
