"""The servers of this user that run on this machine. A server records itself while it accepts requests."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunningServer:
    pid: int
    url: str
    models: tuple[str, ...]
    """Names of its models in the API, the first one first."""
    paths: tuple[str, ...]
    """The models as the server loaded them, in the same order as their first names."""
    started: float
    """Seconds since the epoch."""
    needs_key: bool = False

    def serves(self, model: str) -> bool:
        return model in self.models or model in self.paths


def _folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "paceline" / "servers"


@contextmanager
def recorded(url: str, models: Sequence[str], paths: Sequence[str], needs_key: bool) -> Iterator[None]:
    """Records the server of this process inside the block. It holds a lock on the record, so that the record of a server that
    was killed is known to be old. A folder that cannot be written leaves the server unrecorded."""
    server = RunningServer(os.getpid(), url, tuple(models), tuple(paths), time.time(), needs_key)
    path = _folder() / f"{server.pid}-{url.rpartition(':')[2]}.json"
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        record = draft.open("w", encoding="utf-8")
    except OSError:
        yield
        return
    with record:
        fcntl.flock(record, fcntl.LOCK_EX)
        json.dump(asdict(server), record)
        record.flush()
        draft.replace(path)  # others find it locked
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running_servers() -> list[RunningServer]:
    """The servers that run, the oldest first. Records of servers that were killed are removed."""
    found = []
    for path in _folder().glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError), path.open(encoding="utf-8") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                values = json.load(record)
                found.append(
                    RunningServer(**{**values, "models": tuple(values["models"]), "paths": tuple(values["paths"])})
                )
            else:
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda server: server.started)
