"""The directory is read at an interval, also after it could not be read."""

from collections.abc import Sequence
from queue import SimpleQueue

import pytest

from paceline.targets import pool as directory_watch
from paceline.targets.pool import DirectoryWatch
from paceline.wire.worker_spec import Member
from tests.processes.target_harness import WAIT

MEMBER = Member("a", "target", "target", "tcp://127.0.0.1:1")


class Readings:
    """A directory that answers each reading with the next of these; the last one is repeated."""

    def __init__(self, *readings: Sequence[Member] | Exception) -> None:
        self._readings = list(readings)

    def members(self) -> Sequence[Member]:
        reading = self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]
        if isinstance(reading, Exception):
            raise reading
        return reading


def test_a_directory_that_fails_is_read_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(directory_watch, "DIRECTORY_SECONDS", 0.001)
    members: SimpleQueue[tuple[Member, ...]] = SimpleQueue()
    watch = DirectoryWatch(Readings([], OSError("no route"), [MEMBER]), members.put)
    try:
        assert members.get(timeout=WAIT) == ()
        assert members.get(timeout=WAIT) == (MEMBER,)
        assert "no route" in caplog.text
    finally:
        watch.close()


def test_nothing_is_read_after_close() -> None:
    members: SimpleQueue[tuple[Member, ...]] = SimpleQueue()
    watch = DirectoryWatch(Readings([MEMBER]), members.put)
    members.get(timeout=WAIT)
    watch.close()
    assert not watch._thread.is_alive()


def test_the_listener_may_close_the_watch() -> None:
    watches: SimpleQueue[DirectoryWatch] = SimpleQueue()
    watch = DirectoryWatch(Readings([MEMBER]), lambda members: watches.get(timeout=WAIT).close())
    watches.put(watch)
    watch._thread.join(WAIT)
    assert not watch._thread.is_alive()
