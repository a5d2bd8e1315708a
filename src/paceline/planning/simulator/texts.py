"""Texts differ in the acceptance of their drafts: kinds of texts with alphas of their own. The functions are pure."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import exp, sqrt
from statistics import NormalDist, fmean, harmonic_mean

from paceline.policy.cost.speculation import expected_tokens

KINDS = 16
"""Kinds of texts, all equally frequent."""
_LOG_ODDS = 40.0
"""Log-odds beyond which an alpha is 0 or 1."""
_BISECTIONS = 60


def _deviations() -> tuple[float, ...]:
    """Quantiles of the normal distribution, with a standard deviation of 1."""
    found = [NormalDist().inv_cdf((kind + 0.5) / KINDS) for kind in range(KINDS)]
    scale = sqrt(fmean(deviation * deviation for deviation in found))
    return tuple(deviation / scale for deviation in found)


DEVIATIONS = _deviations()
"""Distance of the log-odds of each kind from the median, in standard deviations."""


def kinds_of_texts(alphas: Sequence[float], spread: float) -> tuple[tuple[float, ...], ...]:
    """Alphas by position of each kind of texts, from the lowest to the highest; one kind without a spread.

    The log-odds of acceptance are normal over texts with the standard deviation `spread`. A text deviates from the median by
    the same amount at every position. `alphas` are means over texts.
    """
    if not spread:
        return (tuple(alphas),)
    return tuple(zip(*(_around(alpha, spread) for alpha in alphas), strict=True))


def pooled_alphas(kinds: Sequence[tuple[float, ...]], positions: int) -> tuple[float, ...]:
    """The alphas by position of a batch as a whole. Texts of a low alpha stay longer, so the mean tokens of a round are the
    harmonic mean of those that each kind expects."""
    if len(kinds) == 1:
        return kinds[0]
    tokens = [harmonic_mean([expected_tokens(alphas, depth) for alphas in kinds]) for depth in range(positions + 1)]
    gains = [1.0, *(after - before for before, after in pairwise(tokens))]
    return tuple(min(1.0, after / before) if before > 0.0 else 0.0 for before, after in pairwise(gains))


def _around(mean: float, spread: float) -> list[float]:
    if not 0.0 < mean < 1.0:
        return [mean] * KINDS
    median = root(lambda at: fmean(alphas_around(at, spread)) - mean)
    return alphas_around(median, spread)


def alphas_around(median: float, spread: float) -> list[float]:
    """Alphas of all kinds, by the log-odds of the median."""
    return [1.0 / (1.0 + exp(-median - spread * deviation)) for deviation in DEVIATIONS]


def root(increasing: Callable[[float], float]) -> float:
    """Where the function is 0."""
    low, high = -_LOG_ODDS, _LOG_ODDS
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        low, high = (low, middle) if increasing(middle) > 0.0 else (middle, high)
    return (low + high) / 2.0
