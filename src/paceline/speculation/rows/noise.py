"""Counter-based noise: a pure function of (seed, choice, position, purpose, token id).

Nothing is stored and nothing is drawn in order, so any worker can recompute the noise of any position at any time. The
integer stage is exact 32-bit arithmetic, the same on every device; only the logarithms of the float stage may differ in
the last bit between devices. Streams of different purposes are independent.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MASK_64 = 2**64 - 1


class Purpose(IntEnum):
    """The use of a noise stream. Acceptance is exact only if the streams are never mixed."""

    SHARED = 0
    """Coupled picks: the target's and the draft's."""
    DRAFT = 1
    """Tokens drawn from `q` for rejection sampling."""
    ACCEPT = 2
    RECOVER = 3
    """The token that ends a rejection round: recovered, bonus or plain."""


class NoiseKey(NamedTuple):
    seed: int
    choice: int
    position: int
    """Absolute position of the token to be chosen, prompt included."""


def gumbel(keys: Sequence[NoiseKey], purpose: Purpose, vocab_size: int, device: torch.device) -> Tensor:
    """[R, V] float32, standard Gumbel noise for every token of the vocabulary."""
    return _gumbel(_mix(_vocabulary(vocab_size, device), _words(keys, purpose, device)))


def gumbel_at(keys: Sequence[NoiseKey], purpose: Purpose, tokens: Tensor) -> Tensor:
    """The noise [R, M] of tokens [R, M], in float32. It equals the columns of `gumbel`, whose other columns are not
    computed."""
    return _gumbel(_mix(_avalanche(tokens.to(torch.int32)), _words(keys, purpose, tokens.device)))


def uniform(keys: Sequence[NoiseKey], purpose: Purpose, tokens: Sequence[int]) -> Tensor:
    """[R] float64 on the host, each strictly inside (0, 1), one per pair of key and token."""
    column = torch.tensor(tokens, dtype=torch.int32).unsqueeze(1)
    bits = _mix(_avalanche(column), _words(keys, purpose, column.device)).squeeze(1)
    return ((bits.to(torch.int64) & 0xFFFFFFFF).to(torch.float64) + 0.5) * 2.0**-32


def _gumbel(bits: Tensor) -> Tensor:
    """G = -log(-log1p(-u)), u = (bits + 1/2) / 2^32. Large G comes from small u, where float32 is finest: |G| < 23."""
    # `minus_u` stays above -1: float32 would round the last 128 of 2^32 values to 1 and G to -inf
    minus_u = bits.view(torch.uint32).to(torch.float32).mul_(-(2.0**-32)).sub_(2.0**-33).clamp_(min=2.0**-24 - 1.0)
    return minus_u.log1p_().neg_().log_().neg_()


def _mix(tokens: Tensor, words: Tensor) -> Tensor:
    """[R, M] int32 from premixed tokens [M] or [R, M] and key words [R, 3]: key, avalanche, key."""
    a, b, c = words.unsqueeze(2).unbind(1)  # [R, 1] each
    return _avalanche_((tokens ^ a).mul_(b | 1)).bitwise_xor_(c)


def _avalanche(x: Tensor) -> Tensor:
    return _avalanche_(x.clone())


def _avalanche_(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit flips every output bit about half the time.

    Two multiply-xorshift rounds with searched constants (the `lowbias32` family). int32 products wrap; `>>` on int32
    drags the sign along, hence the masks.
    """
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0xD35A2D97 - 2**32)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))


@lru_cache(maxsize=8)
def _vocabulary(vocab_size: int, device: torch.device) -> Tensor:
    return _avalanche_(torch.arange(vocab_size, dtype=torch.int32, device=device))


def _words(keys: Sequence[NoiseKey], purpose: Purpose, device: torch.device) -> Tensor:
    """[R, 3] int32: the key bits of each row, two splitmix64 steps after its stream and position."""
    streams = np.array([stream(purpose, key.seed, key.choice) for key in keys], dtype=np.uint64)
    low = _splitmix(streams ^ np.array([key.position for key in keys], dtype=np.uint64))
    words = np.stack((low, _splitmix(low)), axis=1).view(np.int32)
    return torch.from_numpy(words[:, :3]).to(device)


@lru_cache(maxsize=4096)
def stream(purpose: Purpose, seed: int, choice: int) -> int:
    """64 bits that the noise of a row starts from, at any position."""
    state = 0
    for part in (int(purpose), seed, choice):
        state = _splitmix(state ^ part)
    return state


def _splitmix(x: Any) -> Any:
    """A bijection of 64 bits, for an integer or an array of uint64."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
