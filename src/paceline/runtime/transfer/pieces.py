"""Parts travel in pieces of one size, each with a checksum: what is under way is counted in pieces, and any of them may come
first.
"""

from paceline.kernels.cpu.crc32 import copy_crc32, crc32

PIECE_BYTES = 1 << 20
"""Part of the protocol: both ends count in it."""
WINDOW_PIECES = 16
"""Asked for and not yet there, in one fetch: what bounds its memory."""


def num_pieces(size: int) -> int:
    """An empty part has one piece too: that it is there is worth telling."""
    return max(1, -(-size // PIECE_BYTES))


def piece_range(size: int, piece: int) -> tuple[int, int]:
    """The bytes of a part of `size` that `piece` is: start, end."""
    start = piece * PIECE_BYTES
    return start, min(size, start + PIECE_BYTES)


def checksum(data: memoryview) -> int:
    return crc32(data)


def copy(data: memoryview, place: memoryview) -> int:
    """Returns the checksum. Unlike an assignment it lets other threads run."""
    return copy_crc32(data, place)
