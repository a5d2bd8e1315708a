"""The audit log of strict mode: append-only JSON lines in a hash chain.

A line is one object in canonical form (sorted keys, no spaces). It has its number, its time, the hash of the previous line and
its own hash, which is sha256 over the other fields. Changing, removing, adding or swapping a line breaks the chain from there
on. The chain alone cannot show that its end was removed or that the whole file was rewritten. Store a `head` elsewhere and
pass it to `verify` to detect that.

`append` returns after fsync.
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidConfig, PacelineError

GENESIS = "0" * 64
"""`previous` of the first line."""
MAX_LINE_BYTES = 1 << 24


class AuditWriteError(PacelineError):
    """A record could not be written to disk."""


class AuditLogBroken(PacelineError):
    """The hash chain is broken. `line` is the first wrong line, from 1."""

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}")
        self.line = line


@dataclass(frozen=True, slots=True)
class VerifiedLog:
    """The result of verifying a valid audit log."""

    records: int
    head: str
    """Hash of the last line."""
    unfinished: tuple[str, ...]
    """Requests with a start and no end: still running, or lost in a crash."""


class AuditLog:
    """The only writer of an audit log file. It is thread-safe."""

    def __init__(self, path: Path | str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Opens the file to append, and locks it. An incomplete last line, left by a crash, moves to another file, and a record
        notes that."""
        self.path, self._now = Path(path), now
        self._lock = threading.Lock()
        self.head, self.records, self._end = GENESIS, 0, 0
        self._file = _open(self.path)
        try:
            torn = self._find_end()
            if torn:
                self.append("torn", bytes=len(torn), sha256=hashlib.sha256(torn).hexdigest())
        except BaseException:
            os.close(self._file)
            raise

    def append(self, kind: str, **fields: Any) -> str:
        """Writes a record and returns its hash. If it raises `AuditWriteError` the file is unchanged."""
        with self._lock:
            record = {**fields, "n": self.records, "time": self._now().isoformat(), "kind": kind, "previous": self.head}
            head = _hash(record)
            line = _canonical({**record, "hash": head}) + b"\n"
            if len(line) > MAX_LINE_BYTES:
                raise AuditWriteError(
                    f"a record of {len(line)} bytes is too long for {self.path}: the limit is {MAX_LINE_BYTES}"
                )
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(None, "the disk is full")
                os.fsync(self._file)
            except OSError as error:
                os.ftruncate(self._file, self._end)
                raise AuditWriteError(f"cannot write {self.path}: {error.strerror}") from None
            self._end += len(line)
            self.records += 1
            self.head = head
            return head

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> "AuditLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find_end(self) -> bytes:
        """Reads end, head and record count from the last complete line. Returns the bytes after it."""
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, MAX_LINE_BYTES, max(0, size - MAX_LINE_BYTES))
        whole, _, torn = tail.rpartition(b"\n")
        self._end = size - len(torn)
        if self._end:
            last = _parsed(whole.rpartition(b"\n")[2])
            if last is None:
                raise InvalidConfig(
                    f"the last line of audit_trail {self.path} was changed: keep the file, run `paceline audit verify`, and "
                    "set a new file"
                )
            self.head, self.records = last["hash"], last["n"] + 1
        if torn:
            aside = self.path.with_name(f"{self.path.name}.torn-{self._now():%Y%m%dT%H%M%S%f}")
            aside.write_bytes(torn)
            os.ftruncate(self._file, self._end)
        return torn


def verify(path: Path | str, head: str | None = None) -> VerifiedLog:
    """Checks the hash chain. Raises `AuditLogBroken` at the first wrong line, or if the chain does not contain `head`, a hash
    stored earlier."""
    path, previous, number = Path(path), GENESIS, 0
    unfinished: dict[str, None] = {}
    is_found = head is None
    try:
        file = path.open("rb")
    except OSError as error:
        raise InvalidConfig(f"cannot read the audit log {path}: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                raise AuditLogBroken(path, number, "the line is incomplete")
            record = _parsed(line[:-1])
            if record is None:
                raise AuditLogBroken(path, number, "the line was changed: its hash does not match its content")
            if record["previous"] != previous:
                raise AuditLogBroken(
                    path, number, "the line does not follow the previous one: lines were removed, added or swapped"
                )
            if record["n"] != number - 1:
                raise AuditLogBroken(path, number, f"the record number is {record['n']}, expected {number - 1}")
            previous = record["hash"]
            is_found = is_found or previous == head
            if record["kind"] == "started":
                unfinished[record["request"]] = None
            elif record["kind"] == "finished":
                unfinished.pop(record["request"], None)
    if not is_found:
        raise AuditLogBroken(
            path,
            number + 1,
            f"the chain does not contain the head {head}: its end was removed, or the file was rewritten",
        )
    return VerifiedLog(number, previous, tuple(unfinished))


def _open(path: Path) -> int:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidConfig(f"cannot write audit_trail {path}: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise InvalidConfig(f"another server writes audit_trail {path}: set a different file") from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes a new file durable
    finally:
        os.close(folder)
    return file


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record in `line`; None unless the line is canonical and its hash matches."""
    try:
        record = json.loads(line)
        is_valid = isinstance(record, dict) and _canonical(record) == line and record["hash"] == _hash(record)
        is_valid = is_valid and isinstance(record["n"], int) and {"previous", "kind"} <= record.keys()
    except (ValueError, KeyError, RecursionError):
        is_valid = False
    return record if is_valid else None


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical({name: value for name, value in record.items() if name != "hash"})).hexdigest()


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
