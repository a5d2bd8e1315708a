import io
import signal
from contextlib import suppress

import pytest

from paceline.core.clock import VirtualClock
from paceline.tools.progress.progress import PlainProgress, Stopped, StopRequest, stop_on_interrupt


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


def test_a_signal_ends_work_whose_result_may_be_dropped_at_once() -> None:
    with stop_on_interrupt(lambda note: None) as stop:
        done = []
        for _ in range(2):  # after the signal no further work begins
            with suppress(Stopped), stop.interruptible():
                signal.raise_signal(signal.SIGINT)
                done.append("not reached")
        assert done == []


def test_a_signal_does_not_interrupt_other_work() -> None:
    stop = StopRequest()
    with stop.interruptible():
        pass
    stop.request()
    assert stop()


def test_a_complete_stage_is_printed_once() -> None:
    stream = io.StringIO()
    progress = PlainProgress(VirtualClock(), stream)
    for stage in ("one", "two"):
        progress.begin(stage)
        for done in (0.5, 1.0, 1.0, 1.0):
            progress.show(done, "message")
    assert stream.getvalue().count("100%") == 2
