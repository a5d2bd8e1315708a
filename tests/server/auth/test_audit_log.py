"""The trail: whole when nobody touched it, broken at the line that somebody did."""

import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.server.auth import audit_log as trail_module
from paceline.server.auth.audit_log import GENESIS, AuditLog, AuditLogBroken, AuditWriteError, _canonical, _hash, verify

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def written(path: Path, count: int = 5) -> list[str]:
    """The heads, one a record."""
    with AuditLog(path, lambda: NOON) as trail:
        return [trail.append("started", request=f"r{i}", text="Grüße") for i in range(count)]


def test_a_trail_is_a_chain_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
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


def test_a_restart_goes_on_where_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    first = written(path, 2)
    second = written(path, 2)
    assert (verify(path).records, verify(path).head) == (4, second[-1])
    assert verify(path, head=first[-1]).records == 4


def test_an_empty_trail_is_whole(tmp_path: Path) -> None:
    AuditLog(tmp_path / "trail.jsonl").close()
    assert verify(tmp_path / "trail.jsonl").head == GENESIS
    with pytest.raises(InvalidConfig, match="no trail at"):
        verify(tmp_path / "absent.jsonl")


def test_an_end_is_found_for_what_was_started(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "trail.jsonl") as trail:
        trail.append("started", request="a")
        trail.append("started", request="b")
        trail.append("finished", request="a")
    assert verify(tmp_path / "trail.jsonl").unfinished == ("b",)


def _rewrite(line: bytes, **fields: object) -> bytes:
    """As somebody would who knows how hashes are made."""
    record = json.loads(line) | fields
    record["hash"] = _hash(record)
    return _canonical(record) + b"\n"


TAMPERINGS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], int]] = {
    "a letter": (lambda lines: [*lines[:2], lines[2].replace(b"r2", b"rX"), *lines[3:]], 3),
    "a space": (lambda lines: [*lines[:2], lines[2].replace(b",", b", ", 1), *lines[3:]], 3),
    "a hash made anew": (lambda lines: [*lines[:2], _rewrite(lines[2], request="rX"), *lines[3:]], 4),
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
def test_tampering_is_found_where_it_was_done(name: str, tmp_path: Path) -> None:
    tamper, line = TAMPERINGS[name]
    path = tmp_path / "trail.jsonl"
    written(path)
    path.write_bytes(b"".join(tamper(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(AuditLogBroken) as error:
        verify(path)
    assert error.value.line == line, str(error.value)


def test_every_single_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    written(path, 2)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(AuditLogBroken):
            verify(path)


def test_a_cut_end_shows_against_a_head_kept_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    heads = written(path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    assert verify(path).records == 3  # a chain alone does not say where it ends
    assert verify(path, head=heads[2]).records == 3
    with pytest.raises(AuditLogBroken, match="cut off, or written anew"):
        verify(path, head=heads[4])


def test_half_a_line_is_put_aside_and_said(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    written(path, 2)
    with path.open("ab") as file:
        file.write(b'{"half')
    written(path, 1)
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()] == ["started"] * 2 + ["torn", "started"]
    assert verify(path).records == 4
    (aside,) = tmp_path.glob("trail.jsonl.torn-*")
    assert aside.read_bytes() == b'{"half'


def test_a_tampered_end_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    written(path, 2)
    path.write_bytes(path.read_bytes().replace(b"r1", b"rX"))
    with pytest.raises(InvalidConfig, match="the last line of audit_trail"):
        AuditLog(path)


def test_there_is_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with AuditLog(path), pytest.raises(InvalidConfig, match="being written by another server"):
        AuditLog(path)
    AuditLog(path).close()
    with pytest.raises(InvalidConfig, match="cannot be written"):
        AuditLog(tmp_path / "absent" / "trail.jsonl")


def test_a_record_is_on_the_disk_or_not_there_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trail.jsonl"
    with AuditLog(path) as trail:
        trail.append("started", request="a")
        synced: list[int] = []
        sync, write = os.fsync, os.write

        def full(file: int, data: bytes) -> int:
            return write(file, data[:10])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(AuditWriteError, match="the disk is full"):
            trail.append("started", request="b")
        monkeypatch.setattr(os, "write", write)
        monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), sync(file))[1])
        trail.append("started", request="c")
        assert len(synced) == 1
    assert verify(path).unfinished == ("a", "c")


def test_a_record_that_could_not_be_found_again_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "TAIL", 1000)
    path = tmp_path / "trail.jsonl"
    with AuditLog(path) as trail:
        with pytest.raises(AuditWriteError, match="takes no record of"):
            trail.append("note", text="x" * 1000)
        trail.append("note", text="x" * 500)
    assert verify(path).records == 1


def test_many_threads_make_one_chain(tmp_path: Path) -> None:
    path = tmp_path / "trail.jsonl"
    with AuditLog(path) as trail:
        threads = [
            threading.Thread(target=lambda i=i: [trail.append("started", request=f"{i}-{j}") for j in range(10)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert verify(path).records == 40
