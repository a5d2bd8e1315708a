"""A cluster's folder: who is there, under which lock, and the logs. It is how one command finds what another started."""

import fcntl
import json
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from paceline.core.cluster_config import ClusterConfig
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.runtime.deploy.directory import Member


class AlreadyUp(PacelineError):
    """Somebody else supervises this cluster."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    pid: int
    """Of whoever supervises the workers."""
    members: tuple[Member, ...]


class StateFolder:
    """`state.json` is replaced, never rewritten in place. Whoever supervises holds `lock`: a state without it is history."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    @staticmethod
    def of(config: ClusterConfig) -> "StateFolder":
        if config.state_dir is not None:
            return StateFolder(Path(config.state_dir).expanduser())
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return StateFolder(Path(base).expanduser() / "paceline" / config.name)

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def acquire(self) -> None:
        """Become the one who supervises. Raises `AlreadyUp`."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("a")
        except OSError as error:
            raise InvalidConfig(f"cannot use the state folder {self.path}: {error.strerror}; set `state_dir`") from None
        for _ in range(10):  # somebody who only looks holds it for an instant
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                self._lock = lock
                return
        lock.close()
        raise AlreadyUp(f"this cluster is up already ({self.path}): `paceline status` shows it")

    def release(self) -> None:
        if self._lock is not None:
            (self.path / "state.json").unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def write(self, members: Sequence[Member]) -> None:
        document = {"pid": os.getpid(), "members": [asdict(member) for member in members]}
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=".state.", delete=False) as file:
            json.dump(document, file, indent=1)
        Path(file.name).replace(self.path / "state.json")

    def read(self) -> ClusterState | None:
        """Who is up; None when nobody supervises."""
        if not self._is_held():
            return None
        try:
            document = json.loads((self.path / "state.json").read_text("utf-8"))
            return ClusterState(document["pid"], tuple(Member(**member) for member in document["members"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def members(self) -> Sequence[Member]:
        """As a `Directory`: nobody while nobody supervises."""
        state = self.read()
        return () if state is None else state.members

    def stop(self, seconds: float) -> bool:
        """End whoever supervises, and with it the workers. Returns whether there was somebody; raises if it does not end."""
        state = self.read()
        if state is None:
            return False
        os.kill(state.pid, signal.SIGTERM)  # it holds the lock, so the number is still its own
        for _ in range(int(seconds / 0.05)):
            if not self._is_held():
                return True
            time.sleep(0.05)
        raise PacelineError(f"process {state.pid} did not end within {seconds:.0f} s; see the logs in {self.logs}")

    def _is_held(self) -> bool:
        try:
            with (self.path / "lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False
