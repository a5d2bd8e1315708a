"""The folder of a learner: numbered versions with cards and lineage, and a state file that commands change."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.core.config import from_mapping
from paceline.core.errors import InvalidConfig, PacelineError
from paceline.model_files.hub import find_model

Status = Literal["candidate", "kept", "refused"]
VERSIONS, LINEAGE, STATE, ACTIVITY = "versions", "lineage.json", "state.json", "activity.json"
PART = ".part"
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The decision of a gate."""

    is_passed: bool
    gain: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a version comes from, and what the gates decided."""

    version: int
    parent: int
    """Version that it was trained from. 0 stands for the draft that the learner started with."""
    time: str
    """Time in UTC, ISO 8601."""
    samples: int
    tokens: int
    """Output tokens of those samples."""
    held_out: int
    """Held-out samples."""
    seconds: float
    """Time of the training."""
    alpha_before: float
    """Alpha of the parent at the first position, on held-out samples."""
    alpha_after: float
    tokens_per_round_before: float
    tokens_per_round_after: float
    status: Status = "candidate"
    offline: TrialResult | None = None
    online: TrialResult | None = None
    """Verdict of the trial under load. None if the version was not tried."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class LearnState:
    """What commands and the learner share. `paceline learn pause` and `resume` change it."""

    draft: str
    """Folder of the draft that the learner started with."""
    server: str = ""
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Activity:
    """What the learner did last."""

    pid: int
    time: str
    doing: str
    samples: int = 0
    new_tokens: int = 0
    tokens_wanted: int = field(default=0)


class VersionFolder:
    """All writes replace whole files or folders, so that a stop at any time leaves the folder consistent."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, draft: Path, server: str) -> None:
        """Makes the folder, or continues the folder of an earlier run. Removes what a killed run left unfinished."""
        (self.path / VERSIONS).mkdir(parents=True, exist_ok=True)
        for left in (self.path / VERSIONS).glob(f"*{PART}"):
            shutil.rmtree(left)
        with self._locked():
            if not (self.path / STATE).exists():
                self._write_state(LearnState(str(draft.resolve()), server))
                return
            state = self.state()
            if state.draft != str(draft.resolve()):
                raise InvalidConfig(
                    f"{self.path} holds versions of {state.draft}, not of {draft}: give another folder, or that draft"
                )
            self._write_state(replace(state, server=server))

    def state(self) -> LearnState:
        try:
            return from_mapping(LearnState, json.loads((self.path / STATE).read_text("utf-8")))
        except (OSError, ValueError) as error:
            raise InvalidConfig(_no_learner(self.path, error)) from None

    def pause(self, is_paused: bool) -> None:
        with self._locked():
            self._write_state(replace(self.state(), is_paused=is_paused))

    def lineages(self) -> list[Lineage]:
        """All versions, oldest first."""
        files = sorted((self.path / VERSIONS).glob(f"*/{LINEAGE}"))
        return [_lineage(file) for file in files if not file.parent.name.endswith(PART)]

    def current(self) -> int:
        """The newest version that was kept. 0 stands for the draft that the learner started with."""
        return max((lineage.version for lineage in self.lineages() if lineage.status == "kept"), default=0)

    def draft(self, version: int) -> Path:
        """The folder of a version's draft."""
        return Path(self.state().draft) if version == 0 else self.path.resolve() / VERSIONS / f"{version:04d}"

    def candidates(self) -> list[int]:
        """Versions without a verdict."""
        return [lineage.version for lineage in self.lineages() if lineage.status == "candidate"]

    def find(self, draft: str) -> int | None:
        """The version with this folder or name. 0 stands for the draft that the learner started with. None if no version has
        it."""
        try:
            path = find_model(draft).resolve()
        except PacelineError:
            path = Path(draft)
        versions = [0, *(lineage.version for lineage in self.lineages())]
        return next((version for version in reversed(versions) if self.draft(version) == path), None)

    def next_version(self) -> int:
        return max((lineage.version for lineage in self.lineages()), default=0) + 1

    @contextmanager
    def new_version(self, version: int) -> Iterator[Path]:
        """A folder to write the version into. It takes its place in `add`. An exception removes it."""
        part = self.path / VERSIONS / f"{version:04d}{PART}"
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def add(self, lineage: Lineage) -> None:
        """Ends `new_version`. The version is in the folder from now on."""
        part = self.path / VERSIONS / f"{lineage.version:04d}{PART}"
        _write(part / LINEAGE, asdict(lineage))
        os.replace(part, self.path / VERSIONS / f"{lineage.version:04d}")

    def change(self, version: int, **changes: Any) -> Lineage:
        """Changes the lineage of a version. The weights of a refused one are removed."""
        folder = self.path / VERSIONS / f"{version:04d}"
        with self._locked():
            lineage = replace(_lineage(folder / LINEAGE), **changes)
            _write(folder / LINEAGE, asdict(lineage))
        return lineage

    def remove_weights(self, version: int) -> None:
        (self.path / VERSIONS / f"{version:04d}" / WEIGHTS).unlink(missing_ok=True)

    def roll_back(self) -> tuple[int, int]:
        """Marks the current version as refused. A running learner then offers its parent. Returns (version, new current)."""
        current = self.current()
        if current == 0:
            raise InvalidConfig(f"{self.path} has no kept version: there is nothing to roll back to")
        self.change(current, status="refused", note="rolled back by a command")
        return current, self.current()

    def write_activity(self, activity: Activity) -> None:
        _write(self.path / ACTIVITY, asdict(activity))

    def activity(self) -> Activity | None:
        try:
            return from_mapping(Activity, json.loads((self.path / ACTIVITY).read_text("utf-8")))
        except (OSError, ValueError):
            return None

    def _write_state(self, state: LearnState) -> None:
        _write(self.path / STATE, asdict(state))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            folder = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise InvalidConfig(_no_learner(self.path, error)) from None
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)


def _no_learner(folder: Path, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return f"{folder} is not the folder of a learner ({reason}): give the folder that `paceline learn --out` wrote"


def _lineage(file: Path) -> Lineage:
    try:
        content = json.loads(file.read_text("utf-8"))
        verdicts = {
            name: None if content[name] is None else from_mapping(TrialResult, content[name])
            for name in ("offline", "online")
        }
        return from_mapping(
            Lineage, {name: value for name, value in content.items() if name not in verdicts} | verdicts
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidConfig(f"{file} is damaged: {error}; remove its folder") from None


def _write(path: Path, content: dict[str, Any]) -> None:
    part = path.with_name(path.name + PART)
    part.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    os.replace(part, path)
