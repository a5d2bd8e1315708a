"""Keys of cache blocks: salted cryptographic hashes for caches, and fast 64-bit numbers for routers."""

import hashlib
import secrets
import struct
from array import array
from collections.abc import Sequence
from operator import mul

import numpy as np

from paceline.core.sequence import BLOCK_SIZE


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


KEY_MASK = (1 << 64) - 1


class PrefixSums:
    """Numbers of the prefixes of a prompt, block by block. The weights w, r and o are random and secret, so that clients
    cannot construct collisions. The number of the first n blocks is

        sum over i < n of r_i * (o + sum over j < 16 of w_j * token_ij)   mod 2^64, all r and w odd

    A longer prefix extends the sum of a shorter one. Two prefixes collide with a probability of at most 2^-46.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self._tokens = self._draw(BLOCK_SIZE)
        self._offset = self._draw(1)
        self._blocks = self._draw(2048)
        self._token_list, self._offset_int = self._tokens.tolist(), int(self._offset[0])

    def __call__(self, ids: Sequence[int], first_block: int = 0, before: int = 0) -> Sequence[int]:
        """One number for each full block of `ids`, which begin at block `first_block` of their prompt. `before` is the number
        of the blocks before them, or an offset of the whole prompt. An int32 array is used as it is; a list is converted."""
        count = len(ids) // BLOCK_SIZE
        while first_block + count > len(self._blocks):
            self._blocks = np.concatenate([self._blocks, self._draw(len(self._blocks))])
        if isinstance(ids, list | tuple):
            if count == 1:  # a decoding sequence stores one block at a time; numpy would take several times as long
                total = sum(map(mul, ids, self._token_list), self._offset_int)
                return (total * int(self._blocks[first_block]) + before & KEY_MASK,)
            tokens = np.frombuffer(struct.pack(f"{len(ids)}i", *ids), np.int32)  # half the time of np.array
        else:
            tokens = np.asarray(ids)
        sums = tokens[: count * BLOCK_SIZE].astype(np.uint64).reshape(count, BLOCK_SIZE).dot(self._tokens)
        sums += self._offset
        sums *= self._blocks[first_block : first_block + count]
        sums[:1] += np.uint64(before)
        return np.add.accumulate(sums).data  # [count]

    def _draw(self, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
        return self._random.integers(0, 1 << 64, count, np.uint64) | np.uint64(1)
