import signal

import pytest

from paceline.train.interrupt import stop_on_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_wish_the_second_is_not(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    said: list[str] = []
    with stop_on_interrupt(said.append) as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert signal.getsignal(number) is before
    assert len(said) == 1


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt(print):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
