from paceline.runtime.transfer.fair_queue import MAX_WANTS, Turn, Turns
from paceline.runtime.transfer.messages import Want

A, B = b"a" * 16, b"b" * 16


def want(index=0, piece=0, id=A):
    return Want(id, index, piece)


def served(turns):
    result = []
    while (turn := turns.next()) is not None:
        result.append((turn.taker, turn.want.index))
    return result


def test_takers_alternate_however_much_one_wants():
    turns = Turns()
    for index in range(5):
        turns.add(Turn(b"greedy", want(index)), True)
    turns.add(Turn(b"modest", want(7)), True)
    turns.add(Turn(b"third", want(8)), True)
    assert served(turns) == [
        (b"greedy", 0),
        (b"modest", 7),
        (b"third", 8),
        (b"greedy", 1),
        (b"greedy", 2),
        (b"greedy", 3),
        (b"greedy", 4),
    ]


def test_who_waits_for_a_part_gets_in_line_when_it_is_ready():
    turns = Turns()
    turns.add(Turn(b"x", want(1)), False)
    turns.add(Turn(b"y", want(1)), False)
    turns.add(Turn(b"y", want(2)), False)
    assert turns.next() is None
    assert turns.waiting() == {b"x", b"y"}
    assert sorted(turns.waited_for(A)) == [1, 2]
    assert turns.waited_for(B) == []
    turns.ready(B, 1)
    assert not turns.has_ready
    turns.ready(A, 1)
    assert turns.waiting() == {b"y"}
    assert served(turns) == [(b"x", 1), (b"y", 1)]


def test_a_withdrawn_parcel_leaves_the_others():
    turns = Turns()
    turns.add(Turn(b"x", want(1)), True)
    turns.add(Turn(b"x", want(5, id=B)), True)
    turns.add(Turn(b"y", want(2)), False)
    turns.add(Turn(b"z", want(2, id=B)), False)
    assert turns.withdraw(A) == {b"x", b"y"}
    assert turns.withdraw(A) == set()
    assert turns.waiting() == {b"z"}
    assert served(turns) == [(b"x", 5)]


def test_a_taker_that_left_leaves_nothing_behind():
    turns = Turns()
    for index in range(MAX_WANTS):
        turns.add(Turn(b"x", want(index)), is_ready=index % 2 == 0)
    turns.add(Turn(b"y", want(1)), False)
    assert not turns.has_room(b"x")
    assert turns.has_room(b"y")
    turns.drop(b"x")
    turns.drop(b"x")
    assert turns.has_room(b"x")
    assert turns.next() is None
    assert turns.waiting() == {b"y"}
    turns.ready(A, 1)
    assert served(turns) == [(b"y", 1)]


def test_room_comes_back_as_wants_are_served_or_given_up():
    turns = Turns()
    for index in range(MAX_WANTS):
        turns.add(Turn(b"x", want(index)), is_ready=index < 10)
    turns.next()
    assert turns.has_room(b"x")
    turns.add(Turn(b"x", want(99)), True)
    assert not turns.has_room(b"x")
    assert turns.give_up(A, 20) == {b"x"}
    assert turns.give_up(A, 20) == set()
    assert turns.has_room(b"x")
