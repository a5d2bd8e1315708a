import os

import pytest

from paceline.runtime.transfer.channels import nixl_agent
from paceline.runtime.transfer.files import NixlFiles, PlainFiles, Range, open_files
from tests.runtime.transfer.parcels import parts

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


def test_there_and_back(files, file):
    data = parts(SIZES)
    files.write(file, ranges(data, first=7))
    assert os.pread(file, 2 << 20, 0) == bytes(7) + b"".join(data)
    places = [bytearray(size) for size in SIZES]
    files.read(file, list(reversed(ranges(places, first=7))))
    assert places == data


def test_nothing_is_asked_of_nobody(files, file):
    files.write(file, [])
    files.read(file, [])
    assert os.fstat(file).st_size == 0


def test_what_is_not_there_is_not_read(files, file):
    files.write(file, ranges([b"abcdef"]))
    place = bytearray(4)
    for offset in (3, 100, -1):
        with pytest.raises(OSError, match="not in a file of 6"):
            files.read(file, [Range(0, memoryview(bytearray(6))), Range(offset, memoryview(place))])
    assert place == bytes(4)


def test_a_file_that_cannot_be_written(files, file, tmp_path):
    (tmp_path / "fixed").write_bytes(b"abc")
    fixed = os.open(tmp_path / "fixed", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"could not write|Bad file"):
            files.write(fixed, ranges([b"xyz"]))
    finally:
        os.close(fixed)
    files.write(file, ranges([b"xyz"]))
    assert os.pread(file, 3, 0) == b"xyz"


def test_one_of_them_is_always_there(file):
    files = open_files()
    assert isinstance(files, NixlFiles if nixl_agent.is_installed() else PlainFiles)
