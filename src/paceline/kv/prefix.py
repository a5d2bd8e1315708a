"""The key of a cache block: a salted cryptographic hash of the chain of tokens that leads to it."""

import hashlib
from array import array
from collections.abc import Sequence

from paceline.kernels.layout import BLOCK_SIZE


def root_key(salt: str) -> bytes:
    """The parent of a sequence's first block. Sequences with different salts never share a key."""
    # JSON can carry half a surrogate pair; a salt is opaque, so it must hash like any other
    return hashlib.sha256(b"paceline/kv/1\0" + salt.encode("utf-8", "surrogatepass")).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a *full* block. A partial block has none: hashed as if it were whole, it would give false hits."""
    if len(tokens) != BLOCK_SIZE:
        raise ValueError(f"a block holds {BLOCK_SIZE} tokens, got {len(tokens)}")
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


def chain_keys(ids: Sequence[int], salt: str) -> list[bytes]:
    """Keys of every full block of `ids`."""
    keys, parent = [], root_key(salt)
    for start in range(0, len(ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = block_key(parent, ids[start : start + BLOCK_SIZE])
        keys.append(parent)
    return keys
