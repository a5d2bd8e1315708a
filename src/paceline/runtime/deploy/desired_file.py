"""The desired state of a cluster of local processes, as a file that commands change and the supervisor follows."""

import fcntl
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.cluster.scaling.desired import DesiredState
from paceline.core.errors import PacelineError

NAME = "desired.json"


class DesiredFile:
    """`desired.json` in the state folder. It is replaced atomically; `edit` holds a lock while it reads and writes."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / NAME, folder / f"{NAME}.lock"
        self._seen = (0, 0)

    def read(self) -> DesiredState:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=DesiredState)
        except (OSError, msgspec.MsgspecError) as error:
            raise PacelineError(f"the desired state {self._path} cannot be read: {error}") from None

    def read_if_changed(self) -> DesiredState | None:
        """The state, if another one was written since the last call."""
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
        with tempfile.NamedTemporaryFile("wb", dir=self._path.parent, prefix=f".{NAME}.", delete=False) as file:
            file.write(msgspec.json.format(msgspec.json.encode(state)))
        Path(file.name).replace(self._path)

    def edit(self, change: Callable[[DesiredState], DesiredState]) -> DesiredState:
        """Replace the state by `change` of it; returns the new one. Two commands at a time do not lose each other's change."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            state = change(self.read())
            self.write(state)
            return state
