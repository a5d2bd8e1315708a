from paceline.transfer.fair_queue import MAX_REQUESTS, FairQueue, QueuedRequest
from paceline.wire.transfer_messages import ChunkRequest

A, B = b"a" * 16, b"b" * 16


def queued(client, index=0, id=A):
    return QueuedRequest(client, ChunkRequest(id, index, 0))


def pop_all(queue):
    result = []
    while (popped := queue.pop()) is not None:
        result.append((popped.client, popped.request.index))
    return result


def test_clients_alternate_whatever_one_of_them_requests():
    queue = FairQueue()
    for index in range(5):
        queue.add(queued(b"many", index), True)
    queue.add(queued(b"one", 7), True)
    queue.add(queued(b"third", 8), True)
    assert pop_all(queue) == [
        (b"many", 0),
        (b"one", 7),
        (b"third", 8),
        (b"many", 1),
        (b"many", 2),
        (b"many", 3),
        (b"many", 4),
    ]


def test_a_waiting_request_becomes_ready_with_its_part():
    queue = FairQueue()
    queue.add(queued(b"x", 1), False)
    queue.add(queued(b"y", 1), False)
    queue.add(queued(b"y", 2), False)
    assert queue.pop() is None
    assert queue.waiting_clients() == {b"x", b"y"}
    assert sorted(queue.awaited_parts(A)) == [1, 2]
    assert queue.awaited_parts(B) == []
    queue.mark_ready(B, 1)
    assert not queue.has_ready
    queue.mark_ready(A, 1)
    assert queue.waiting_clients() == {b"y"}
    assert pop_all(queue) == [(b"x", 1), (b"y", 1)]


def test_removing_a_transfer_keeps_requests_for_others():
    queue = FairQueue()
    queue.add(queued(b"x", 1), True)
    queue.add(queued(b"x", 5, id=B), True)
    queue.add(queued(b"y", 2), False)
    queue.add(queued(b"z", 2, id=B), False)
    assert queue.remove_transfer(A) == {b"x", b"y"}
    assert queue.remove_transfer(A) == set()
    assert queue.waiting_clients() == {b"z"}
    assert pop_all(queue) == [(b"x", 5)]


def test_removing_a_client_removes_all_its_requests():
    queue = FairQueue()
    for index in range(MAX_REQUESTS):
        queue.add(queued(b"x", index), is_ready=index % 2 == 0)
    queue.add(queued(b"y", 1), False)
    assert not queue.can_accept(b"x")
    assert queue.can_accept(b"y")
    queue.remove_client(b"x")
    queue.remove_client(b"x")
    assert queue.can_accept(b"x")
    assert queue.pop() is None
    assert queue.waiting_clients() == {b"y"}
    queue.mark_ready(A, 1)
    assert pop_all(queue) == [(b"y", 1)]


def test_served_and_removed_requests_no_longer_count():
    queue = FairQueue()
    for index in range(MAX_REQUESTS):
        queue.add(queued(b"x", index), is_ready=index < 10)
    queue.pop()
    assert queue.can_accept(b"x")
    queue.add(queued(b"x", 99), True)
    assert not queue.can_accept(b"x")
    assert queue.remove_part(A, 20) == {b"x"}
    assert queue.remove_part(A, 20) == set()
    assert queue.can_accept(b"x")
