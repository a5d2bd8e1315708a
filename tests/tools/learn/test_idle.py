from paceline.core.clock import VirtualClock
from paceline.tools.train.further import Pacer


def test_steps_take_the_share_of_the_time() -> None:
    clock = VirtualClock()
    pacer = Pacer(0.25, clock, clock.advance)
    for _ in range(10):
        clock.advance(1.0)
        pacer()
    assert clock.now() == 40.0


def test_a_share_of_one_does_not_pause() -> None:
    clock = VirtualClock()
    pacer = Pacer(1.0, clock, clock.advance)
    clock.advance(5.0)
    pacer()
    assert clock.now() == 5.0
