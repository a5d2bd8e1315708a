"""Branches packed into bytes: all of one length, with numbers of fixed width.

A branch of n tokens is its accepted count (8 bits), the token that follows, and the n tokens drafted after it. Tokens have 16
bits, or 32 for large vocabularies. All numbers are little-endian. n is 0 while the branch is being drafted.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import SequenceBranches

MAX_NARROW = 1 << 16


class BranchKey(NamedTuple):
    """Outcome of a verification: the number of accepted drafts, and the token that follows them."""

    accepted: int
    token: int


@lru_cache(maxsize=256)
def _layout(length: int, is_wide: bool) -> Struct:
    return Struct(f"<B{1 + length}{'I' if is_wide else 'H'}")


def pack(sequence: int, round_: int, branches: Iterable[tuple[BranchKey, Sequence[int]]]) -> list[SequenceBranches]:
    """One record for each length among `branches`, which are outcomes, each with the tokens drafted after it."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for key, tokens in branches:
        by_length.setdefault(len(tokens), []).append((*key, *tokens))
    packed = []
    for length, rows in by_length.items():
        is_wide = max(max(row[1:]) for row in rows) >= MAX_NARROW
        write = _layout(length, is_wide).pack
        packed.append(SequenceBranches(sequence, round_, b"".join([write(*row) for row in rows]), length, is_wide))
    return packed


def unpack(record: SequenceBranches) -> list[tuple[BranchKey, list[int]]]:
    """All branches of a record. Raises `MalformedMessage`."""
    layout = _layout(record.length, record.is_wide)
    if len(record.packed) % layout.size:
        raise MalformedMessage(f"{len(record.packed)} bytes are not a multiple of the branch size {layout.size}")
    return [(BranchKey(accepted, token), tokens) for accepted, token, *tokens in layout.iter_unpack(record.packed)]
