"""Chunks of a part, and the parts of a `Transfer`."""

from itertools import pairwise

import pytest

from paceline.kernels.cpu.checksums import crc32
from paceline.transfer.transfer import CHUNK_BYTES, Transfer, TransferFailed, chunk_range, num_chunks
from paceline.wire.transfer_messages import MAX_PART_BYTES, MAX_PARTS


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_chunks_cover_a_part_once(size):
    ranges = [chunk_range(size, chunk) for chunk in range(num_chunks(size))]
    assert len(ranges) >= 1
    assert ranges[0][0] == 0
    assert all(end == following for (_, end), (following, _) in pairwise(ranges))
    assert ranges[-1][1] == size
    assert all(end - start <= CHUNK_BYTES for start, end in ranges)


def test_a_part_is_ready_once_it_is_filled():
    transfer = Transfer([3, 0])
    assert transfer.part(0) is None
    transfer.fill(0, memoryview(b"abc"))
    part = transfer.part(0)
    assert part is not None
    assert part.data == b"abc"
    assert part.checksums == (crc32(memoryview(b"abc")),)
    transfer.fill(1, memoryview(b""))
    assert transfer.part(1) is not None


def test_views_of_other_formats_are_stored_as_bytes():
    transfer = Transfer([8])
    transfer.fill(0, memoryview(bytes(8)).cast("f"))
    assert transfer.part(0).data.format == "B"


def test_listeners_are_called_after_fill_and_abort():
    transfer, calls = Transfer([1, 1]), []

    def listener():
        calls.append(1)

    transfer.subscribe(listener)
    transfer.fill(1, memoryview(b"x"))
    transfer.abort("the prefill was cancelled")
    assert len(calls) == 2
    transfer.unsubscribe(listener)
    transfer.abort("again")
    assert len(calls) == 2
    assert transfer.part(1) is not None
    with pytest.raises(TransferFailed, match="prefill was cancelled"):
        transfer.part(0)


def test_a_wrong_size_a_strided_view_and_a_second_fill_are_refused():
    transfer = Transfer([4])
    with pytest.raises(ValueError, match="declared with 4 bytes and is filled with 3"):
        transfer.fill(0, memoryview(b"abc"))
    with pytest.raises(ValueError, match="contiguous"):
        transfer.fill(0, memoryview(b"abcdefgh")[::2])
    transfer.fill(0, memoryview(b"abcd"))
    with pytest.raises(ValueError, match="filled already"):
        transfer.fill(0, memoryview(b"efgh"))
    assert transfer.part(0).data == b"abcd"


@pytest.mark.parametrize("sizes", [[], [-1], [MAX_PART_BYTES + 1], [0] * (MAX_PARTS + 1)])
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="a transfer has"):
        Transfer(sizes)
