import random
import zlib

import pytest

from paceline.kernels.cpu import checksums as module
from paceline.kernels.cpu.checksums import copy_crc32, crc32

SIZES = [0, 1, 7, 8, 15, 16, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 512, 1000, 4096, 1 << 20, (1 << 20) + 13]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_native", [True, False])
def test_equals_the_crc_of_zlib(size, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(module.native, "library", lambda: None)
    draw = random.Random(size)
    for offset in (0, 1, 5):
        data = memoryview(draw.randbytes(size + offset))[offset:]
        copy = bytearray(offset + size + 3)
        assert crc32(data) == zlib.crc32(data)
        assert copy_crc32(data, memoryview(copy)[offset : offset + size]) == zlib.crc32(data)
        assert bytes(copy) == bytes(offset) + bytes(data) + bytes(3)


def test_every_byte_changes_the_crc():
    data = bytearray(300)
    sums = {crc32(memoryview(data))}
    for at in range(len(data)):
        data[at] = 1
        sums.add(crc32(memoryview(data)))
        data[at] = 0
    assert len(sums) == 301


def test_a_copy_of_another_size_is_rejected():
    with pytest.raises(ValueError, match="cannot copy 4 bytes to 3 bytes"):
        copy_crc32(memoryview(b"abcd"), memoryview(bytearray(3)))
    with pytest.raises(ValueError, match="read-only"):
        copy_crc32(memoryview(b"abcd"), memoryview(bytes(4)))
