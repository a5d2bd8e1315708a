"""Chains of blocks with readable keys."""

from array import array
from collections.abc import Sequence

from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.prefix import chain_keys
from paceline.kv.tiers.block import TieredBlock


def chain(count: int, salt: str = "", first: int = 0) -> list[TieredBlock]:
    """A prompt of `count` full blocks that starts with token `first`."""
    ids = [first, *range(1, count * BLOCK_SIZE)]
    keys = chain_keys(ids, salt)
    return [
        TieredBlock(key, keys[i - 1] if i else None, tokens(ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]), salt)
        for i, key in enumerate(keys)
    ]


def tokens(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
