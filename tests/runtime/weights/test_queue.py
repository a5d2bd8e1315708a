import threading

from paceline.core.clock import VirtualClock
from paceline.runtime.weights.queue import OVERDUE_SECONDS, PartQueue


def test_parts_go_out_in_order_and_come_back_when_they_fail() -> None:
    queue = PartQueue([3, 1, 2])
    first, second = queue.take("a"), queue.take("b")
    assert first is not None
    assert second is not None
    assert (first.part, second.part) == (1, 2)
    queue.failed(first)
    again = queue.take("b")
    assert again is not None
    assert again.part == 1


def test_all_are_sent_home_when_everything_was_brought() -> None:
    queue = PartQueue([1, 2])
    errands = [queue.take("a"), queue.take("b")]
    idle: list[object] = [0]
    thread = threading.Thread(target=lambda: idle.append(queue.take("c")))
    thread.start()
    for errand in errands:
        assert errand is not None
        assert queue.brought(errand)
    thread.join(10)
    assert idle == [0, None]
    assert queue.take("a") is None


def test_a_part_that_is_overdue_is_brought_by_a_second_source_and_the_first_is_told() -> None:
    clock = VirtualClock()
    queue = PartQueue([1, 2], clock)
    slow, quick = queue.take("slow"), queue.take("quick")
    assert slow is not None
    assert quick is not None
    clock.advance(0.5)
    assert queue.brought(quick)
    clock.advance(OVERDUE_SECONDS)
    second = queue.take("quick")
    assert second is not None
    assert second.part == slow.part
    assert queue.brought(second)
    assert slow.cancelled.is_set()
    assert not queue.brought(slow)  # too late
    assert queue.take("quick") is None


def test_the_failure_of_one_of_two_carriers_leaves_the_other_at_it() -> None:
    clock = VirtualClock()
    queue = PartQueue([1], clock)
    slow = queue.take("slow")
    clock.advance(2 * OVERDUE_SECONDS)
    second = queue.take("quick")
    assert slow is not None
    assert second is not None
    queue.failed(slow)
    assert queue.brought(second)


def test_closing_ends_whoever_waits_and_whoever_carries() -> None:
    queue = PartQueue([1])
    errand = queue.take("a")
    assert errand is not None
    waiting: list[object] = [0]
    thread = threading.Thread(target=lambda: waiting.append(queue.take("b")))
    thread.start()
    queue.close()
    thread.join(10)
    assert waiting == [0, None]
    assert errand.cancelled.is_set()
