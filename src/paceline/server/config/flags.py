"""Run-time flags: one store, kept in a file so that a restart remembers them.

The file is JSON: the flags, and the last changes with who made them and when. It is replaced, never rewritten in place, so
that it is whole at any moment.
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
from paceline.core.speculation import SpeculationFlags
from paceline.server.config.settings import nearest

HISTORY = 100
"""Changes that are remembered."""

Listener = Callable[[SpeculationFlags], None]


class FlagsNotSaved(PacelineError):
    """A change could not be written down, and was not made."""


@dataclass(frozen=True, slots=True)
class Change:
    who: str
    when: str
    """UTC, ISO 8601."""
    changes: Mapping[str, Any]


class FlagStore:
    """The flags in force. Safe from any thread; changes are made one at a time, and listeners hear of them in order."""

    def __init__(
        self, path: Path | str | None = None, check: Callable[[SpeculationFlags], None] = lambda flags: None
    ) -> None:
        """`check` raises `InvalidRequest` for flags that this server cannot follow; it is asked before any are taken."""
        self._path = None if path is None else Path(path)
        self._check = check
        self._lock = threading.RLock()
        self._listeners: list[Listener] = []
        self._flags = SpeculationFlags()
        self._history: tuple[Change, ...] = ()
        if self._path is not None:
            self._flags, self._history = self._load(self._path)

    def get(self) -> SpeculationFlags:
        return self._flags

    @property
    def history(self) -> tuple[Change, ...]:
        """The last changes, oldest first."""
        return self._history

    def update(self, changes: Mapping[str, Any], who: str) -> SpeculationFlags:
        """Change some flags; `None` gives a choice back to the configuration. Raises `InvalidRequest` that names the field."""
        known = {field.name for field in fields(SpeculationFlags)}
        for name in changes:
            if name not in known:
                raise InvalidRequest(f"unknown flag {name!r}; {nearest(name, known)}", field=name)
        with self._lock:
            flags = replace(self._flags, **changes)
            self._check(flags)
            change = Change(who, datetime.now(UTC).isoformat(timespec="seconds"), dict(changes))
            history = (*self._history, change)[-HISTORY:]
            if self._path is not None:
                self._save(self._path, flags, history)
            self._flags, self._history = flags, history
            for listener in self._listeners:
                listener(flags)
        return flags

    def subscribe(self, listener: Listener) -> None:
        """`listener` hears the flags now and after every change, on the thread that made it."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._flags)

    def _load(self, path: Path) -> tuple[SpeculationFlags, tuple[Change, ...]]:
        if not path.parent.is_dir():
            raise InvalidConfig(f"flags_file {path}: the folder {path.parent} does not exist; make it first")
        try:
            text = path.read_text("utf-8")
        except FileNotFoundError:
            return SpeculationFlags(), ()
        except OSError as error:
            raise InvalidConfig(f"flags_file {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise self._set_aside(path, error) from None
        try:
            document = json.loads(text)
            flags = SpeculationFlags(**document["flags"])
            history = tuple(Change(**change) for change in document["history"])
        except (ValueError, KeyError, TypeError, InvalidRequest) as error:
            raise self._set_aside(path, error) from None
        try:
            self._check(flags)
        except InvalidRequest as error:
            raise InvalidConfig(f"flags_file {path}: {error}. Correct or remove the file") from None
        return flags, history

    @staticmethod
    def _set_aside(path: Path, error: Exception) -> InvalidConfig:
        aside = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%S}")
        path.rename(aside)
        return InvalidConfig(
            f"flags_file {path} is damaged ({error}). It was moved to {aside}: repair it and move it back, or start again "
            "without it, with the flags as configured"
        )

    @staticmethod
    def _save(path: Path, flags: SpeculationFlags, history: tuple[Change, ...]) -> None:
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
            raise FlagsNotSaved(f"the flags were not changed: {path} cannot be written: {error.strerror}") from None
