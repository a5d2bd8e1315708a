"""The state folder of a cluster: its desired state, its members, its lock and its logs. Commands find a
running cluster through it.
"""

import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import msgspec

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.core.status import WorkerLife
from paceline.policy.scaling.desired import DesiredState
from paceline.wire.worker_spec import Member

DESIRED = "desired.json"


class DesiredFile:
    """`desired.json` in the state folder. It is replaced atomically; `edit` holds a lock while it reads and writes."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / DESIRED, folder / f"{DESIRED}.lock"
        self._seen = (0, 0)

    def read(self) -> DesiredState:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=DesiredState)
        except (OSError, msgspec.MsgspecError) as error:
            raise PacelineError(f"the desired state {self._path} cannot be read: {error}") from None

    def read_if_changed(self) -> DesiredState | None:
        """The state, if a new state was written since the last call."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        seen = (status.st_ino, status.st_mtime_ns)
        if seen == self._seen:
            return None
        self._seen = seen
        return self.read()

    def write(self, state: DesiredState) -> None:
        _replace(self._path, msgspec.json.format(msgspec.json.encode(state)))

    def edit(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Replace the state by the result of `change` and return it. A lock keeps concurrent commands from losing a change."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = change(self.read())
            self.write(state)
            return state


def _replace(path: Path, content: bytes) -> None:
    """Replace the file atomically. If that fails, for example because the disk is full, the old file alone stays."""
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
        except OSError:
            Path(file.name).unlink()
            raise
    Path(file.name).replace(path)


def _default_base() -> Path:
    """The folder of the state folders of clusters without a `state_dir`."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "paceline"


class AlreadyUp(PacelineError):
    """Another process supervises this cluster."""


class NotUp(PacelineError):
    """The cluster has no running workers."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    pid: int
    """Process id of the supervisor."""
    members: tuple[Member, ...]


class StateFolder:
    """`state.json` is replaced atomically. The supervisor holds `lock`; a state without the lock held is stale."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self._desired_file = DesiredFile(path)

    @staticmethod
    def of(config: ClusterConfig) -> "StateFolder":
        if config.state_dir is not None:
            return StateFolder(Path(config.state_dir).expanduser())
        return StateFolder(_default_base() / config.name)

    @staticmethod
    def running() -> "tuple[StateFolder, ...]":
        """Clusters of this user that run as processes of this machine, by name. Those with a `state_dir` are not found."""
        base = _default_base()
        folders = (StateFolder(path) for path in sorted(base.iterdir())) if base.is_dir() else ()
        return tuple(folder for folder in folders if folder.read() is not None)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def acquire(self) -> None:
        """Take the supervisor's lock. Raises `AlreadyUp`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise InvalidConfig(f"cannot use the state folder {self.path}: {error.strerror}; set `state_dir`") from None
        for _ in range(10):  # readers hold the lock for an instant
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                self._lock = lock
                return
        lock.close()
        raise AlreadyUp(f"this cluster is already up ({self.path}): see `paceline status`")

    def release(self) -> None:
        if self._lock is not None:
            for name in ("state.json", "desired.json"):
                (self.path / name).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def write(self, members: Sequence[Member]) -> None:
        document = {"pid": os.getpid(), "members": [asdict(member) for member in members]}
        _replace(self.path / "state.json", json.dumps(document, indent=1).encode())

    def read(self) -> ClusterState | None:
        """The current state. It is None without a supervisor. Raises if the folder cannot be read now, for example because this
        process has too many open files: that says nothing about the workers."""
        try:
            if not self._is_held():
                return None
            document = json.loads((self.path / "state.json").read_text("utf-8"))
            members = ({**member, "life": WorkerLife(**member["life"])} for member in document["members"])
            return ClusterState(document["pid"], tuple(Member(**member) for member in members))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        except OSError as error:
            raise PacelineError(f"the state folder {self.path} cannot be read: {error.strerror}") from None

    def members(self) -> Sequence[Member]:
        """Implements `Directory`. It is empty without a supervisor."""
        state = self.read()
        return () if state is None else state.members

    def desired(self) -> DesiredState:
        """Implements `LivePools`, as `edit` does: the supervisor follows the file."""
        return self._desired_file.read()

    def edit(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        return self._desired_file.edit(change)

    def stop(self, seconds: float) -> bool:
        """Stop the supervisor and its workers. Returns whether there was one. Raises if it does not exit within `seconds`."""
        state = self.read()
        if state is None:
            return False
        os.kill(state.pid, signal.SIGTERM)  # it holds the lock, so the pid is not reused
        for _ in range(int(seconds / 0.05)):
            if not self._is_held():
                return True
            time.sleep(0.05)
        raise PacelineError(f"process {state.pid} did not exit within {seconds:.0f} s; see the logs in {self.logs}")

    def _is_held(self) -> bool:
        try:
            with (self.path / "lock").open() as lock:  # for reading: the disk may be full or read-only
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
