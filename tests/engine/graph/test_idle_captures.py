from paceline.core.clock import VirtualClock
from paceline.engine.graph.captures import SLICE_SECONDS, IdleCaptures


def test_captures_run_in_order_and_in_slices() -> None:
    clock, done = VirtualClock(), list[int]()
    captures = IdleCaptures(clock.now)

    def capture(number: int) -> None:
        done.append(number)
        clock.advance(0.6 * SLICE_SECONDS)

    captures.add([lambda number=number: capture(number) for number in range(3)])
    assert captures.has_idle_work
    captures.use_idle_time()
    assert done == [0, 1]  # the second began within the slice
    captures.use_idle_time()
    assert done == [0, 1, 2]
    assert not captures.has_idle_work
    captures.use_idle_time()


def test_captures_take_a_tenth_of_a_busy_time() -> None:
    now = [100.0]
    captures = IdleCaptures(lambda: now[0])
    assert captures.is_allowed
    captures.count_busy(2.0)
    now[0] += 17.9
    assert not captures.is_allowed
    now[0] += 0.2
    assert captures.is_allowed
