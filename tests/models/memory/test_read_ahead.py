from pathlib import Path

from paceline.models.memory.memory import ReadAhead


def test_all_blocks_of_all_files_are_read(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "ab"]
    files[0].write_bytes(bytes(1000))
    files[1].write_bytes(bytes(25))
    with ReadAhead([*files, tmp_path / "missing"], threads=3, block=100) as reading:
        for thread in reading._threads:
            thread.join()
    assert reading.num_bytes == 1025


def test_without_files_nothing_is_read() -> None:
    with ReadAhead(()) as reading:
        pass
    assert reading.num_bytes == 0
