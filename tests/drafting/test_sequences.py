"""All sequences of a pool: which are known, and where they are open."""

from paceline.drafting.sequence import PoolSequences
from tests.drafting.fakes import FakeConnection, progress


def test_a_sequence_is_created_by_its_first_progress() -> None:
    sequences = PoolSequences(1000)
    assert sequences.get(7) is None
    first = sequences.update(progress(7, 1, 2))
    later = progress(7, 1, 2, 3)
    assert sequences.update(later) is first
    assert first.progress is later


def test_a_loss_unassigns_the_sequences_of_that_worker() -> None:
    sequences, one, two = PoolSequences(1000), FakeConnection("one"), FakeConnection("two")
    for number, where in ((1, one), (2, one), (3, two)):
        sequences.update(progress(number)).open_at(where.as_connection())
    assert sequences.open_at(one.as_connection(), 3) is None
    sequences.unassign(one.as_connection(), [2, 3, 99])
    assert sequences.connections() == [one, None, two]
    sequences.unassign(one.as_connection())
    assert [sequences.connection_of(number) for number in (1, 2, 3, 99)] == [None, None, two, None]


def test_removed_sequences_are_returned_if_their_worker_is_ready() -> None:
    sequences, one, lost = PoolSequences(1000), FakeConnection("one"), FakeConnection("lost", is_ready=False)
    for number, where in ((1, one), (2, lost), (3, one)):
        sequences.update(progress(number)).open_at(where.as_connection())
    sequences.update(progress(4))
    assert sequences.remove([1, 2, 3, 4, 99]) == {one: [1, 3]}
    assert sequences.connections() == []
