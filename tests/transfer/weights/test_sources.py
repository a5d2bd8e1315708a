import threading

from paceline.core.clock import VirtualClock
from paceline.transfer.weights.sources import OVERDUE_SECONDS, PartQueue


def test_parts_are_assigned_in_order_and_again_after_a_failure() -> None:
    queue = PartQueue([3, 1, 2])
    first, second = queue.take("a"), queue.take("b")
    assert first is not None
    assert second is not None
    assert (first.part, second.part) == (1, 2)
    queue.fail(first)
    again = queue.take("b")
    assert again is not None
    assert again.part == 1


def test_take_returns_none_when_all_parts_are_loaded() -> None:
    queue = PartQueue([1, 2])
    assignments = [queue.take("a"), queue.take("b")]
    idle: list[object] = [0]
    thread = threading.Thread(target=lambda: idle.append(queue.take("c")))
    thread.start()
    for assignment in assignments:
        assert assignment is not None
        assert queue.complete(assignment)
    thread.join(10)
    assert idle == [0, None]
    assert queue.take("a") is None


def test_an_overdue_part_is_assigned_twice_and_the_slower_source_is_cancelled() -> None:
    clock = VirtualClock()
    queue = PartQueue([1, 2], clock)
    slow, quick = queue.take("slow"), queue.take("quick")
    assert slow is not None
    assert quick is not None
    clock.advance(0.5)
    assert queue.complete(quick)
    clock.advance(OVERDUE_SECONDS)
    second = queue.take("quick")
    assert second is not None
    assert second.part == slow.part
    assert queue.complete(second)
    assert slow.cancelled.is_set()
    assert not queue.complete(slow)  # the second source was faster
    assert queue.take("quick") is None


def test_the_failure_of_one_of_two_sources_keeps_the_other() -> None:
    clock = VirtualClock()
    queue = PartQueue([1], clock)
    slow = queue.take("slow")
    clock.advance(2 * OVERDUE_SECONDS)
    second = queue.take("quick")
    assert slow is not None
    assert second is not None
    queue.fail(slow)
    assert queue.complete(second)


def test_close_ends_waiting_and_loading_sources() -> None:
    queue = PartQueue([1])
    assignment = queue.take("a")
    assert assignment is not None
    waiting: list[object] = [0]
    thread = threading.Thread(target=lambda: waiting.append(queue.take("b")))
    thread.start()
    queue.close()
    thread.join(10)
    assert waiting == [0, None]
    assert assignment.cancelled.is_set()
