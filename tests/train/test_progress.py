import signal

import pytest

from paceline.train.progress import stop_on_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_requests_a_stop_and_restores_the_handler(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    notes: list[str] = []
    with stop_on_interrupt(notes.append) as stop:
        assert not stop()
        signal.raise_signal(number)
        assert stop()
        assert signal.getsignal(number) is before
    assert len(notes) == 1


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_on_interrupt(print):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
