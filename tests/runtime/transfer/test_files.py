import os

import pytest

from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.files import NixlFiles, PlainFiles, Range, open_files
from tests.runtime.transfer.transfers import random_parts

SIZES = (300_000, 1, 0, 4096, 1 << 20)


@pytest.fixture(params=["nixl", "plain"])
def files(request):
    if request.param == "plain":
        return PlainFiles()
    if not nixl_agent.is_installed():
        pytest.skip("NIXL is not installed: pip install 'paceline[transfer]'")
    return NixlFiles()


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "blocks", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def ranges(data, first=0):
    offsets = [first + sum(map(len, data[:index])) for index in range(len(data))]
    return [Range(offset, memoryview(part)) for offset, part in zip(offsets, data, strict=True)]


def test_written_ranges_are_read_back(files, file):
    data = random_parts(SIZES)
    files.write(file, ranges(data, first=7))
    assert os.pread(file, 2 << 20, 0) == bytes(7) + b"".join(data)
    buffers = [bytearray(size) for size in SIZES]
    files.read(file, list(reversed(ranges(buffers, first=7))))
    assert buffers == data


def test_no_ranges_do_nothing(files, file):
    files.write(file, [])
    files.read(file, [])
    assert os.fstat(file).st_size == 0


def test_a_range_past_the_end_fails_before_anything_is_read(files, file):
    files.write(file, ranges([b"abcdef"]))
    buffer = bytearray(4)
    for offset in (3, 100, -1):
        with pytest.raises(OSError, match="not in a file of 6"):
            files.read(file, [Range(0, memoryview(bytearray(6))), Range(offset, memoryview(buffer))])
    assert buffer == bytes(4)


def test_a_read_only_file_cannot_be_written(files, file, tmp_path):
    (tmp_path / "read_only").write_bytes(b"abc")
    read_only = os.open(tmp_path / "read_only", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"could not write|Bad file"):
            files.write(read_only, ranges([b"xyz"]))
    finally:
        os.close(read_only)
    files.write(file, ranges([b"xyz"]))
    assert os.pread(file, 3, 0) == b"xyz"


def test_nixl_is_used_where_it_is_installed(file):
    files = open_files()
    assert isinstance(files, NixlFiles if nixl_agent.is_installed() else PlainFiles)
