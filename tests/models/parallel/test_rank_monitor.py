"""What happens when a rank exits."""

import sys
import threading
from collections.abc import Iterator

import pytest

from paceline.core.child import ChildProcess
from paceline.models.parallel.ranks import RankMonitor

DEADLINE = 30.0


class Device:
    """A device that may wait for a rank forever."""

    def __init__(self, is_stuck: bool) -> None:
        self.asked, self._done = threading.Event(), threading.Event()
        if not is_stuck:
            self._done.set()

    def finish(self) -> None:
        self.asked.set()
        self._done.wait(DEADLINE)

    def release(self) -> None:
        self._done.set()


class Ended:
    def __init__(self) -> None:
        self.message: str | None = None
        self._event = threading.Event()

    def __call__(self, message: str) -> None:
        self.message = message
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


@pytest.fixture
def process() -> Iterator[ChildProcess]:
    process = ChildProcess([sys.executable, "-c", "import sys; sys.stdin.read()"])
    yield process
    process.kill()
    process.wait()
    process.close()


def test_a_device_that_waits_for_a_lost_rank_ends_the_process(process: ChildProcess) -> None:
    device, ended = Device(is_stuck=True), Ended()
    RankMonitor([process], device.finish, ended, stuck_seconds=0.05)
    assert not device.asked.is_set()
    process.kill()
    assert ended.wait(DEADLINE)
    assert ended.message is not None
    assert ended.message.startswith("rank 1 of 2 exited with status -9 during a pass")
    device.release()


def test_a_device_that_finishes_leaves_the_error_to_the_next_pass(process: ChildProcess) -> None:
    device, ended = Device(is_stuck=False), Ended()
    monitor = RankMonitor([process], device.finish, ended, stuck_seconds=DEADLINE)
    process.kill()
    monitor.join(DEADLINE)
    assert device.asked.is_set()
    assert ended.message is None


def test_ranks_may_exit_after_close(process: ChildProcess) -> None:
    device, ended = Device(is_stuck=True), Ended()
    monitor = RankMonitor([process], device.finish, ended, stuck_seconds=0.0)
    monitor.close()
    process.kill()
    monitor.join(DEADLINE)
    assert not device.asked.is_set()
    assert ended.message is None
