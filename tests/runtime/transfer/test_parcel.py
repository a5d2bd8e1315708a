from itertools import pairwise

import pytest

from paceline.runtime.transfer.errors import TransferFailed
from paceline.runtime.transfer.handle import MAX_PART_BYTES, MAX_PARTS
from paceline.runtime.transfer.pieces import PIECE_BYTES, checksum, num_pieces, piece_range
from paceline.runtime.transfer.transfer import Parcel


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_pieces_cover_a_part_once(size):
    ranges = [piece_range(size, piece) for piece in range(num_pieces(size))]
    assert len(ranges) >= 1
    assert ranges[0][0] == 0
    assert all(end == following for (_, end), (following, _) in pairwise(ranges))
    assert ranges[-1][1] == size
    assert all(end - start <= PIECE_BYTES for start, end in ranges)


def test_a_part_is_there_once_it_is_filled():
    parcel = Parcel([3, 0])
    assert parcel.part(0) is None
    parcel.fill(0, memoryview(b"abc"))
    part = parcel.part(0)
    assert part is not None
    assert part.data == b"abc"
    assert part.checksums == (checksum(memoryview(b"abc")),)
    parcel.fill(1, memoryview(b""))
    assert parcel.part(1) is not None


def test_other_formats_are_bytes_too():
    parcel = Parcel([8])
    parcel.fill(0, memoryview(bytes(8)).cast("f"))
    assert parcel.part(0).data.format == "B"


def test_whoever_watches_hears_of_parts_and_of_the_end():
    parcel, heard = Parcel([1, 1]), []

    def changed():
        heard.append(1)

    parcel.watch(changed)
    parcel.fill(1, memoryview(b"x"))
    parcel.abandon("the prefill was cancelled")
    assert len(heard) == 2
    parcel.unwatch(changed)
    parcel.abandon("again")
    assert len(heard) == 2
    assert parcel.part(1) is not None
    with pytest.raises(TransferFailed, match="prefill was cancelled"):
        parcel.part(0)


def test_wrong_parts_are_refused():
    parcel = Parcel([4])
    with pytest.raises(ValueError, match="announced with 4 bytes and is filled with 3"):
        parcel.fill(0, memoryview(b"abc"))
    with pytest.raises(ValueError, match="contiguous"):
        parcel.fill(0, memoryview(b"abcdefgh")[::2])
    parcel.fill(0, memoryview(b"abcd"))
    with pytest.raises(ValueError, match="filled already"):
        parcel.fill(0, memoryview(b"efgh"))
    assert parcel.part(0).data == b"abcd"


@pytest.mark.parametrize("sizes", [[], [-1], [MAX_PART_BYTES + 1], [0] * (MAX_PARTS + 1)])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="a parcel has"):
        Parcel(sizes)
