"""The state folder: commands find a running cluster through it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig
from paceline.core.pool_config import PoolConfig
from paceline.deploy.processes.state import AlreadyUp, StateFolder
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
