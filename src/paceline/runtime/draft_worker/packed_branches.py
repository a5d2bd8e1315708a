"""Branches as few bytes: all of one length, one after the other, numbers of fixed width.

A branch of n tokens is its accepted count (8 bits), the token that follows, and the n tokens drafted from there, 16 bits each
or, where a vocabulary needs it, 32; little-endian. n = 0 says that it is being drafted. One call reads them all: a target has
hundreds to look at in a step and uses one of each sequence.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from struct import Struct

from paceline.runtime.wire.codec import Malformed
from paceline.runtime.wire.messages import Ahead, Branch

NARROW = 1 << 16


@lru_cache(maxsize=256)
def _layout(length: int, is_wide: bool) -> Struct:
    return Struct(f"<B{1 + length}{'I' if is_wide else 'H'}")


def pack(sequence: int, round_: int, branches: Iterable[tuple[tuple[int, int], Sequence[int]]]) -> list[Ahead]:
    """`branches`: (accepted, token) and the tokens drafted from there. A record for each length among them."""
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for key, tokens in branches:
        by_length.setdefault(len(tokens), []).append((*key, *tokens))
    packed = []
    for length, rows in by_length.items():
        is_wide = max(max(row[1:]) for row in rows) >= NARROW
        write = _layout(length, is_wide).pack
        packed.append(Ahead(sequence, round_, [], b"".join([write(*row) for row in rows]), length, is_wide))
    return packed


def unpack(ahead: Ahead) -> list[Branch]:
    """All branches of a record, however they were sent."""
    if not ahead.packed:
        return ahead.branches
    layout = _layout(ahead.length, ahead.is_wide)
    if len(ahead.packed) % layout.size:
        raise Malformed(f"{len(ahead.packed)} bytes are not branches of {layout.size} each")
    return [Branch(accepted, token, tokens) for accepted, token, *tokens in layout.iter_unpack(ahead.packed)]
