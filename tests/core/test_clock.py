import pytest

from paceline.core.clock import Clock, VirtualClock, WallClock


def test_virtual_clock_moves_only_when_advanced() -> None:
    clock: Clock = VirtualClock(5.0)
    assert clock.now() == clock.now() == 5.0
    assert isinstance(clock, VirtualClock)
    clock.advance(0.5)
    clock.advance(0.0)
    assert clock.now() == 5.5


def test_virtual_clock_cannot_go_backwards() -> None:
    clock = VirtualClock()
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1.0)
    assert clock.now() == 0.0


def test_wall_clock_never_goes_backwards() -> None:
    clock = WallClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


def test_a_virtual_clock_moves_on_to_a_time_but_not_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance_to(7.5)
    assert clock.now() == 7.5
    clock.advance_to(6.0)
    assert clock.now() == 7.5
