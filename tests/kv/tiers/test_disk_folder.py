"""Blocks in files: kept across restarts, and used only if every byte is unchanged."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.core.errors import InvalidConfig
from paceline.kv.tiers.block import HEADER_BYTES, MAX_SALT_BYTES, TieredBlock
from paceline.kv.tiers.tiers import DiskFolder
from tests.kv.tiers.chains import chain

SIZE = 10_000
OURS, THEIRS = bytes(range(32)), bytes(range(1, 33))
BLOCKS = chain(3, salt="tenant")


def contents(block: TieredBlock) -> memoryview:
    return memoryview((block.key * (SIZE // 32 + 1))[:SIZE])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[DiskFolder]:
    made = DiskFolder(tmp_path / "kv", OURS, SIZE)
    for block in BLOCKS:
        assert made.write(block, contents(block))
    yield made
    made.close()


def reopened(folder: DiskFolder, fingerprint: bytes = OURS, size: int = SIZE) -> DiskFolder:
    folder.close()
    return DiskFolder(folder.folder, fingerprint, size)


def file_of(folder: DiskFolder, block: TieredBlock) -> Path:
    (path,) = folder.folder.glob(f"*/{block.key.hex()}.kv")
    return path


def read(folder: DiskFolder, block: TieredBlock) -> bytes | None:
    into = bytearray(SIZE)
    found = folder.read(block.key, memoryview(into))
    assert found in (None, block)
    return bytes(into) if found else None


def test_blocks_and_their_metadata_survive_a_restart(folder: DiskFolder) -> None:
    again = reopened(folder)
    assert set(again.scan()) == set(BLOCKS)
    assert all(read(again, block) == contents(block) for block in BLOCKS)
    again.close()


def test_least_recently_used_blocks_come_first_and_a_read_is_a_use(folder: DiskFolder) -> None:
    for age, block in enumerate(BLOCKS):
        os.utime(file_of(folder, block), (100 + age, 100 + age))
    read(folder, BLOCKS[0])
    assert list(folder.scan()) == [BLOCKS[1], BLOCKS[2], BLOCKS[0]]


@pytest.mark.parametrize("place", [0, 20, 60, 100, 300, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_bit_is_found_at_any_position(folder: DiskFolder, place: int) -> None:
    path = file_of(folder, BLOCKS[1])
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    assert read(folder, BLOCKS[1]) is None
    assert not path.exists()
    assert read(folder, BLOCKS[0]) == contents(BLOCKS[0])


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES, HEADER_BYTES + SIZE - 1, HEADER_BYTES + SIZE + 1])
def test_a_file_of_another_length_is_not_used(folder: DiskFolder, length: int) -> None:
    path = file_of(folder, BLOCKS[1])
    path.write_bytes((path.read_bytes() + b"more")[:length])
    assert BLOCKS[1] not in set(folder.scan())
    path.write_bytes(b"x" * length)
    assert read(folder, BLOCKS[1]) is None


def test_a_block_under_another_name_is_not_used(folder: DiskFolder) -> None:
    """As after a mix-up of files: the name alone is not trusted."""
    file_of(folder, BLOCKS[0]).replace(file_of(folder, BLOCKS[1]))
    assert read(folder, BLOCKS[1]) is None
    assert set(folder.scan()) == {BLOCKS[2]}


def test_blocks_of_another_model_are_not_used(folder: DiskFolder) -> None:
    foreign = reopened(folder, THEIRS)
    assert all(read(foreign, block) is None for block in BLOCKS[:1])
    assert list(foreign.scan()) == []
    foreign.close()


def test_blocks_of_another_size_are_not_used(folder: DiskFolder) -> None:
    other = reopened(folder, OURS, SIZE // 2)
    assert other.read(BLOCKS[0].key, memoryview(bytearray(SIZE // 2))) is None
    assert list(other.scan()) == []
    other.close()


def test_unfinished_files_are_deleted(folder: DiskFolder) -> None:
    path = file_of(folder, BLOCKS[2])
    unfinished = path.with_suffix(".tmp")
    path.rename(unfinished)
    assert set(folder.scan()) == set(BLOCKS[:2])
    assert not unfinished.exists()


def test_a_full_disk_leaves_no_file(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = chain(1, first=9)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(block, contents(block))
    assert not list(folder.folder.glob(f"*/{block.key.hex()}*"))


def test_a_salt_too_long_for_the_header_is_not_kept(folder: DiskFolder) -> None:
    fits, too_long = chain(1, salt="s" * MAX_SALT_BYTES), chain(1, salt="s" * (MAX_SALT_BYTES + 1))
    assert folder.write(fits[0], contents(fits[0]))
    assert read(folder, fits[0]) == contents(fits[0])
    assert not folder.write(too_long[0], contents(too_long[0]))


def test_files_are_readable_by_their_owner_only(folder: DiskFolder) -> None:
    path = file_of(folder, BLOCKS[0])
    assert path.stat().st_mode & 0o077 == 0
    assert folder.folder.stat().st_mode & 0o077 == 0


def test_one_process_at_a_time(folder: DiskFolder) -> None:
    with pytest.raises(InvalidConfig, match="in use by another process"):
        DiskFolder(folder.folder, OURS, SIZE)
    code = (
        "from pathlib import Path; from paceline.kv.tiers.tiers import DiskFolder;"
        f"DiskFolder(Path({str(folder.folder)!r}), bytes(32), 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "in use by another process" in done.stderr
    reopened(folder).close()


def test_a_folder_that_cannot_be_created_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be used"):
        DiskFolder(tmp_path / "file" / "kv", OURS, SIZE)


def test_a_failed_read_is_a_miss(folder: DiskFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "utime", broken)  # stands for any of the calls
    assert read(folder, BLOCKS[0]) is None
    monkeypatch.undo()
    assert read(folder, BLOCKS[1]) == contents(BLOCKS[1])
