"""Messages of draft workers, and the connection or sequence that handles them."""

import pytest

from paceline.core.clock import VirtualClock
from paceline.drafting.proposer import PoolInbox
from paceline.drafting.sequence import PoolSequences
from paceline.wire.draft_messages import Busy, Drafts, Error, ErrorCode, Goodbye, Message, RoundDraft
from tests.drafting.fakes import FakeConnection, FakeConnections, progress


class Case:
    """Sequence 7 is open at the connection and waits for the draft of its first round."""

    def __init__(self) -> None:
        self.connection, self.sequences = FakeConnection(), PoolSequences(1000)
        self.inbox = PoolInbox(FakeConnections(self.connection).as_connections(), self.sequences, VirtualClock(100.0))
        self.sequence = self.sequences.update(progress(7))
        self.sequence.open_at(self.connection.as_connection())
        self.sequence.start_round(3, 100.0)

    def receive(self, *messages: Message) -> None:
        self.connection.incoming.extend(messages)  # type: ignore[arg-type]
        assert self.inbox.receive() == 100.0


def test_a_draft_reaches_its_sequence() -> None:
    case = Case()
    case.receive(Drafts(1, [RoundDraft(7, 1, [3, 4, 5], b"", False)]))
    assert case.sequence.chain is not None
    assert case.sequence.chain.tokens == (3, 4, 5)


def test_a_draft_of_an_unknown_sequence_is_late() -> None:
    case = Case()
    case.receive(Drafts(1, [RoundDraft(8, 1, [3], b"", False)]))
    assert (case.connection.counters.late, case.sequence.chain) == (1, None)


def test_a_busy_worker_opens_no_sequence() -> None:
    case = Case()
    case.receive(Busy(1, [7], 250))
    assert case.connection.calls == [("busy", 100.25)]
    assert case.sequence.connection is None


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (Error(ErrorCode.NO_HELLO, "text"), "hello"),
        (Error(ErrorCode.EPOCH, "text"), "hello"),
        (Error(ErrorCode.VERSION, "text"), ("refuse", "text")),
        (Error(ErrorCode.TOKENIZER, "text"), ("refuse", "text")),
        (Goodbye("stopping"), ("lose", "it is stopping")),
    ],
)
def test_a_message_about_the_worker_goes_to_its_connection(message: Message, call: object) -> None:
    case = Case()
    case.receive(message)
    assert case.connection.calls == [call]
    assert case.sequence.connection is case.connection.as_connection()


def test_an_error_of_a_sequence_closes_it_there() -> None:
    case = Case()
    case.receive(Error(ErrorCode.UNKNOWN_SEQUENCE, "text", [7]))
    assert (case.connection.calls, case.sequence.connection) == ([], None)


def test_maintain_receives_before_it_pings() -> None:
    case = Case()
    case.connection.incoming.append(Goodbye("stopping"))
    assert case.inbox.maintain() == 100.0
    assert case.connection.calls == [("lose", "it is stopping"), "maintain"]
