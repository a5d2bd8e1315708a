"""A two-sample test on sampled tokens: Kolmogorov-Smirnov on their ranks under the target's distribution.

The rank of a token is the probability of all likelier tokens plus a random part of its own. It is uniform on (0, 1) for a token
sampled from p, whatever p is. So the tokens of all prompts and positions form one sample.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor

from paceline.core.errors import MissingDependency

LEVEL = 1e-3
"""Probability of a false alarm."""
MISS = 0.01
"""Probability to miss a detectable difference."""


@dataclass(frozen=True, slots=True)
class TwoSample:
    """The result of the test."""

    sizes: tuple[int, int]
    distance: float
    """Largest distance between the two empirical distribution functions."""
    p_value: float

    @property
    def is_different(self) -> bool:
        return self.p_value < LEVEL

    @property
    def detectable(self) -> float:
        """The smallest true distance that is found with probability 1 - MISS, by Hoeffding's inequality.

        A value of 1 or more means that the samples are too small.
        """
        spread = sum(1.0 / size for size in self.sizes) if all(self.sizes) else math.inf
        critical = math.sqrt(-math.log(LEVEL / 2.0) / 2.0 * spread)
        return critical + math.sqrt(-math.log(MISS) / 2.0 * spread)


def rank(probs: Tensor, token: int, rng: random.Random) -> float:
    """The randomised rank of a token under `probs` [V]."""
    own, before = probs[token], probs[:token]
    return float(probs[probs > own].sum() + before[before == own].sum()) + rng.random() * float(own)


def compare(first: Sequence[float], second: Sequence[float]) -> TwoSample:
    """Test whether two samples of ranks have one distribution."""
    stats = require_scipy()
    if not first or not second:
        return TwoSample((len(first), len(second)), 0.0, 1.0)
    found = stats.ks_2samp(first, second, method="asymp")
    return TwoSample((len(first), len(second)), float(found.statistic), float(found.pvalue))


def require_scipy() -> ModuleType:
    """`scipy.stats`. Raises an error with the install command if scipy is missing."""
    try:
        from scipy import stats
    except ImportError:
        raise MissingDependency("scipy", "an audit of rejection sampling", "bench") from None
    return stats
