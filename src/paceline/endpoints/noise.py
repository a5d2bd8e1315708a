"""The shared noise of coupled verification for single tokens, without torch.

The function is that of `speculation/verification/noise.py`, of which a test compares every value: a text that is sampled from
another engine's log-probabilities uses the noise that our engine would use at the same seed and position.
"""

import math
from functools import lru_cache

_MASK_32, _MASK_64 = 2**32 - 1, 2**64 - 1


def gumbel(seed: int, position: int, token: int) -> float:
    """Standard Gumbel noise of one token of the first choice."""
    a, b, c = _words(seed, position)
    bits = _avalanche(((_avalanche(token) ^ a) * (b | 1)) & _MASK_32) ^ c
    u = min((bits + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -math.log(-math.log1p(-u))


@lru_cache(maxsize=64)
def _words(seed: int, position: int) -> tuple[int, int, int]:
    """The key bits of a position."""
    state = 0
    for part in (0, seed, 0):  # purpose, seed, choice
        state = _splitmix(state ^ part)
    low = _splitmix(state ^ position)
    return low & _MASK_32, low >> 32, _splitmix(low) & _MASK_32


def _avalanche(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK_32
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & _MASK_32
    return x ^ (x >> 15)


def _splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)
