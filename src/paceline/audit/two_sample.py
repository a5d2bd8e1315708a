"""Do two sets of sampled tokens follow the same law? Kolmogorov-Smirnov on their ranks under the target's own distribution.

The rank of a token is the mass of all likelier ones, and a random part of its own: uniform on (0, 1) for a token drawn from p,
whatever p is and whatever was drawn before. Tokens of all prompts and positions can thus be put together.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

LEVEL = 1e-3
"""How often sets of the same law are called different."""
MISS = 0.01
"""The chance to overlook that a detectable difference is stated for."""


@dataclass(frozen=True, slots=True)
class TwoSample:
    sizes: tuple[int, int]
    distance: float
    """The largest between the two empirical distribution functions."""
    p_value: float

    @property
    def is_different(self) -> bool:
        return self.p_value < LEVEL

    @property
    def detectable(self) -> float:
        """A true distance from here on is found with probability 1 - MISS or more, by Hoeffding's inequality at the place where
        it is largest. 1 or more: these samples are too small to promise anything."""
        spread = sum(1.0 / size for size in self.sizes) if all(self.sizes) else math.inf
        critical = math.sqrt(-math.log(LEVEL / 2.0) / 2.0 * spread)
        return critical + math.sqrt(-math.log(MISS) / 2.0 * spread)


def rank(law: Tensor, token: int, rng: random.Random) -> float:
    """Of a token under law [V]."""
    own, before = law[token], law[:token]
    return float(law[law > own].sum() + before[before == own].sum()) + rng.random() * float(own)


def compare(one: Sequence[float], other: Sequence[float]) -> TwoSample:
    if not one or not other:
        return TwoSample((len(one), len(other)), 0.0, 1.0)
    one, other = sorted(one), sorted(other)
    distance = max(abs(bisect_right(one, x) / len(one) - bisect_right(other, x) / len(other)) for x in (*one, *other))
    size = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    return TwoSample((len(one), len(other)), distance, _tail((size + 0.12 + 0.11 / size) * distance))


def _tail(x: float) -> float:
    """Kolmogorov's distribution: the probability of more than x."""
    if x < 0.2:  # 1 to fifteen digits, where the series converges slowly
        return 1.0
    total = sum((-1.0) ** (k - 1) * math.exp(-2.0 * (k * x) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2.0 * total))
