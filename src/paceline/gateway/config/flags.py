"""Run-time flags, stored in a file so that they survive a restart.

The JSON file holds the flags and the last changes, with their author and time. Every change replaces the file atomically.
"""

import json
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidConfig, InvalidRequest, PacelineError
from paceline.core.request import SpeculationFlags
from paceline.gateway.config.settings import suggest

MAX_HISTORY = 100
"""Changes in the history."""

FlagListener = Callable[[SpeculationFlags], None]


class FlagsNotSaved(PacelineError):
    """The file could not be written, so the flags did not change."""


@dataclass(frozen=True, slots=True)
class FlagChange:
    """One change in the history."""

    who: str
    when: str
    """Time in UTC, ISO 8601."""
    changes: Mapping[str, Any]


class FlagStore:
    """The current flags. Thread-safe: changes happen one at a time, and listeners receive them in order."""

    def __init__(
        self, path: Path | str | None = None, check: Callable[[SpeculationFlags], None] = lambda flags: None
    ) -> None:
        """`check` raises `InvalidRequest` for flags that the server does not support; it runs before every change."""
        self._path = None if path is None else Path(path)
        self._check = check
        self._lock = threading.RLock()
        self._listeners: list[FlagListener] = []
        self._flags = SpeculationFlags()
        self._history: tuple[FlagChange, ...] = ()
        if self._path is not None:
            self._flags, self._history = self._load(self._path)

    def get(self) -> SpeculationFlags:
        return self._flags

    @property
    def history(self) -> tuple[FlagChange, ...]:
        """The last changes, oldest first."""
        return self._history

    def update(self, changes: Mapping[str, Any], who: str) -> SpeculationFlags:
        """Changes some flags; None returns a flag to the configuration. Raises `InvalidRequest` with the flag's name."""
        known = {field.name for field in fields(SpeculationFlags)}
        for name in changes:
            if name not in known:
                raise InvalidRequest(f"unknown flag {name!r}; {suggest(name, known)}", field=name)
        with self._lock:
            flags = replace(self._flags, **changes)
            self._check(flags)
            change = FlagChange(who, datetime.now(UTC).isoformat(timespec="seconds"), dict(changes))
            history = (*self._history, change)[-MAX_HISTORY:]
            if self._path is not None:
                self._save(self._path, flags, history)
            self._flags, self._history = flags, history
            for listener in self._listeners:
                listener(flags)
        return flags

    def subscribe(self, listener: FlagListener) -> None:
        """Calls `listener` with the flags now and after every change, on the thread that makes the change."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._flags)

    def _load(self, path: Path) -> tuple[SpeculationFlags, tuple[FlagChange, ...]]:
        if not path.parent.is_dir():
            raise InvalidConfig(f"flags_file {path}: the folder {path.parent} does not exist: create it")
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            return SpeculationFlags(), ()
        except OSError as error:
            raise InvalidConfig(f"cannot read flags_file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise self._move_corrupt(path, error) from None
        try:
            document = json.loads(text)
            flags = SpeculationFlags(**document["flags"])
            history = tuple(FlagChange(**change) for change in document["history"])
        except (ValueError, KeyError, TypeError, InvalidRequest) as error:
            raise self._move_corrupt(path, error) from None
        try:
            self._check(flags)
        except InvalidRequest as error:
            raise InvalidConfig(f"flags_file {path}: {error}. Correct or remove the file") from None
        return flags, history

    @staticmethod
    def _move_corrupt(path: Path, error: Exception) -> InvalidConfig:
        moved = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        path.rename(moved)
        return InvalidConfig(
            f"flags_file {path} is damaged ({error}) and was moved to {moved}: repair it and move it back, or start again "
            "without it, which resets the flags"
        )

    @staticmethod
    def _save(path: Path, flags: SpeculationFlags, history: tuple[FlagChange, ...]) -> None:
        document = {"flags": asdict(flags), "history": [asdict(change) for change in history]}
        temporary = None
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as file:
                temporary = Path(file.name)
                json.dump(document, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            raise FlagsNotSaved(f"the flags did not change: cannot write {path}: {error.strerror}") from None
