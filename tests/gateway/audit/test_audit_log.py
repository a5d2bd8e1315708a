"""The audit log: `verify` accepts an unchanged file and finds the first changed line."""

import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.audit import audit_log as module
from paceline.gateway.audit.audit_log import (
    GENESIS,
    AuditLog,
    AuditLogBroken,
    AuditWriteError,
    _canonical,
    _hash,
    verify,
)

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def written(path: Path, count: int = 5) -> list[str]:
    """The hash of every record."""
    with AuditLog(path, lambda: NOON) as log:
        return [log.append("started", request=f"r{i}", text="Grüße") for i in range(count)]


def test_records_form_a_hash_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    heads = written(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["n"] for record in records] == [0, 1, 2, 3, 4]
    assert [record["previous"] for record in records] == [GENESIS, *heads[:-1]]
    assert [record["hash"] for record in records] == heads
    assert records[0]["time"] == "2026-01-02T12:00:00+00:00"
    found = verify(path)
    assert (found.records, found.head) == (5, heads[-1])
    assert found.unfinished == ("r0", "r1", "r2", "r3", "r4")
    assert path.stat().st_mode & 0o077 == 0


def test_a_restart_continues_the_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first = written(path, 2)
    second = written(path, 2)
    assert (verify(path).records, verify(path).head) == (4, second[-1])
    assert verify(path, head=first[-1]).records == 4


def test_an_empty_log_is_valid(tmp_path: Path) -> None:
    AuditLog(tmp_path / "audit.jsonl").close()
    assert verify(tmp_path / "audit.jsonl").head == GENESIS
    with pytest.raises(InvalidConfig, match="cannot read the audit log"):
        verify(tmp_path / "absent.jsonl")


def test_unfinished_requests_are_listed(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.jsonl") as log:
        log.append("started", request="a")
        log.append("started", request="b")
        log.append("finished", request="a")
    assert verify(tmp_path / "audit.jsonl").unfinished == ("b",)


def _rewrite(line: bytes, **fields: object) -> bytes:
    """Changes a record and recomputes its hash."""
    record = json.loads(line) | fields
    record["hash"] = _hash(record)
    return _canonical(record) + b"\n"


TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a letter": (lambda lines: [*lines[:2], lines[2].replace(b"r2", b"rX"), *lines[3:]], 3),
    "a space": (lambda lines: [*lines[:2], lines[2].replace(b",", b", ", 1), *lines[3:]], 3),
    "a new hash": (lambda lines: [*lines[:2], _rewrite(lines[2], request="rX"), *lines[3:]], 4),
    "the first line": (lambda lines: [_rewrite(lines[0], previous="1" * 64), *lines[1:]], 1),
    "a line removed": (lambda lines: [*lines[:2], *lines[3:]], 3),
    "the beginning removed": (lambda lines: lines[1:], 1),
    "a line doubled": (lambda lines: [*lines[:3], *lines[2:]], 4),
    "two lines swapped": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], 2),
    "a line added": (lambda lines: [*lines, _rewrite(lines[0], n=5)], 6),
    "a number changed": (lambda lines: [*lines[:4], _rewrite(lines[4], n=7)], 5),
    "a line cut off": (lambda lines: [*lines[:4], lines[4][:-9]], 5),
    "an empty line": (lambda lines: [*lines[:2], b"\n", *lines[2:]], 3),
    "something else": (lambda lines: [*lines, b"[1]\n"], 6),
    "no hash": (lambda lines: [*lines, b"{}\n"], 6),
}


@pytest.mark.parametrize("name", TAMPERINGS)
def test_verify_finds_the_changed_line(name: str, tmp_path: Path) -> None:
    tamper, line = TAMPERINGS[name]
    path = tmp_path / "audit.jsonl"
    written(path)
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(AuditLogBroken) as error:
        verify(path)
    assert error.value.line == line, str(error.value)


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path, 2)
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(AuditLogBroken):
            verify(path)


def test_a_removed_end_is_found_with_a_stored_head(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    heads = written(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(path).records == 3  # the chain alone does not show its end
    assert verify(path, head=heads[2]).records == 3
    with pytest.raises(AuditLogBroken, match="its end was removed"):
        verify(path, head=heads[4])


def test_an_incomplete_line_moves_to_another_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path, 2)
    with path.open("ab") as file:
        file.write(b'{"half')
    written(path, 1)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["started"] * 2 + ["torn", "started"]
    assert verify(path).records == 4
    (moved,) = tmp_path.glob("audit.jsonl.torn-*")
    assert moved.read_bytes() == b'{"half'


def test_a_changed_last_line_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    written(path, 2)
    path.write_bytes(path.read_bytes().replace(b"r1", b"rX"))
    with pytest.raises(InvalidConfig, match="the last line of audit_trail"):
        AuditLog(path)


def test_only_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path), pytest.raises(InvalidConfig, match="another server writes"):
        AuditLog(path)
    AuditLog(path).close()
    with pytest.raises(InvalidConfig, match="cannot write audit_trail"):
        AuditLog(tmp_path / "absent" / "audit.jsonl")


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        log.append("started", request="a")
        synced: list[int] = []
        sync, write = os.fsync, os.write

        def full(file: int, data: bytes) -> int:
            return write(file, data[:10])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(AuditWriteError, match="the disk is full"):
            log.append("started", request="b")
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), sync(file))[1])
        log.append("started", request="c")
        assert len(synced) == 1
    assert verify(path).unfinished == ("a", "c")


def test_a_record_that_is_too_long_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        with pytest.raises(AuditWriteError, match="is too long for"):
            log.append("note", text="x" * 1000)
        log.append("note", text="x" * 500)
    assert verify(path).records == 1


def test_many_threads_write_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        threads = [
            threading.Thread(target=lambda i=i: [log.append("started", request=f"{i}-{j}") for j in range(10)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(path).records == 40
