"""The state folder: commands find a running cluster through it."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.pool_config import PoolConfig
from paceline.deploy.processes.pools import ProcessPools
from paceline.deploy.processes.state import AlreadyUp, StateFolder
from paceline.policy.scaling.desired import DesiredState
from paceline.wire.worker_spec import Member

POOLS = (PoolConfig("t", "target", "m"),)
MEMBER = Member("target-0", "target", "target", "tcp://127.0.0.1:5555", "key")


def test_members_exist_while_the_lock_is_held(tmp_path: Path) -> None:
    folder, other = StateFolder(tmp_path / "c"), StateFolder(tmp_path / "c")
    assert other.read() is None
    folder.acquire()
    assert other.members() == ()
    folder.write([MEMBER])
    state = other.read()
    assert state is not None
    assert (state.pid, state.members) == (os.getpid(), (MEMBER,))
    with pytest.raises(AlreadyUp, match="paceline status"):
        other.acquire()
    folder.release()
    assert other.read() is None
    other.acquire()
    other.release()


def test_a_read_only_disk_hides_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    folder.write([MEMBER])
    real = Path.open

    def read_only(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", read_only)
    assert StateFolder(tmp_path).members() == (MEMBER,)
    monkeypatch.undo()
    folder.release()


def test_a_folder_that_cannot_be_read_now_is_no_cluster_without_workers(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    folder.write([MEMBER])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(PacelineError, match="cannot be read: Too many open files"):
            StateFolder(tmp_path).members()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    folder.release()


def test_a_full_disk_keeps_the_last_state(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    folder.write([MEMBER])
    before = sorted(tmp_path.iterdir())
    with full_disk(), pytest.raises(OSError, match="File too large"):
        folder.write([MEMBER, MEMBER])
    assert sorted(tmp_path.iterdir()) == before
    assert folder.members() == (MEMBER,)
    folder.release()


@contextmanager
def full_disk() -> Iterator[None]:
    """This process can write nothing to files: the limit of their size is 0."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Polls(threading.Event):
    """A stop that is set after these actions, each before one poll."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        super().__init__()
        self._actions = deque(actions)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._actions:
            return True
        self._actions.popleft()()
        return False


def test_pools_go_on_when_the_disk_was_full(tmp_path: Path) -> None:
    config = ClusterConfig(POOLS, state_dir=str(tmp_path))
    folder = StateFolder(tmp_path)
    folder.acquire()
    pools = ProcessPools(folder, DesiredState.of(config).without_goal("t-0"))
    pools._written = (MEMBER,)  # what is on the disk is old
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (0, limits[1]))
    free = partial(resource.setrlimit, resource.RLIMIT_FSIZE, limits)
    try:
        pools.run(Polls(full, free))
    finally:
        free()
    state = folder.read()
    assert state is not None
    assert state.members == ()
    folder.release()


def test_state_left_by_a_crash_is_ignored(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    folder.acquire()
    folder.write([MEMBER])
    assert folder._lock is not None
    folder._lock.close()  # as a crash would
    assert (tmp_path / "state.json").exists()
    assert StateFolder(tmp_path).read() is None
    assert StateFolder(tmp_path).stop(1) is False


SUPERVISOR = """
import signal, sys
from pathlib import Path
from paceline.deploy.processes.state import StateFolder
folder = StateFolder(Path(sys.argv[1]))
folder.acquire()
folder.write([])
signal.signal(signal.SIGTERM, lambda *_: (folder.release(), sys.exit(0)))
print("up", flush=True)
signal.pause()
"""


def test_stop_ends_the_supervisor(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert StateFolder(tmp_path).stop(10) is True
        assert process.wait(10) in (0, -signal.SIGTERM)


def test_location_of_the_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert StateFolder.of(ClusterConfig(POOLS, name="two")).path == tmp_path / "paceline" / "two"
    assert StateFolder.of(ClusterConfig(POOLS, state_dir=str(tmp_path / "x"))).path == tmp_path / "x"


def test_running_clusters_are_found_by_their_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert StateFolder.running() == ()
    one, two, stopped = (StateFolder.of(ClusterConfig(POOLS, name=name)) for name in ("one", "two", "stopped"))
    for folder in (one, two, stopped):
        folder.acquire()
        folder.write([MEMBER])
    stopped.release()
    try:
        assert [folder.path.name for folder in StateFolder.running()] == ["one", "two"]
    finally:
        one.release()
        two.release()


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="state_dir"):
        StateFolder(tmp_path / "file" / "c").acquire()
