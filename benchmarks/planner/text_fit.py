"""Fits the acceptance of drafts, and how it differs between texts, to what a target accepted. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from operator import mul
from statistics import fmean

from paceline.planning.simulator.settings.config import MAX_SPREAD
from paceline.planning.simulator.texts import KINDS, alphas_around, root

_ROUNDS = 40
"""Steps of expectation and maximisation for one spread."""
_GOLDEN = (sqrt(5.0) - 1.0) / 2.0
_SEARCHES = 16
"""Divisions of the range of spreads."""
_LEAST = 1e-12
"""Least probability, so that its logarithm exists."""


@dataclass(frozen=True, slots=True)
class TextRounds:
    """Drafts of one text by position: those that the target tested, and those that it accepted."""

    tested: tuple[float, ...]
    accepted: tuple[float, ...]


def fit_texts(texts: Sequence[TextRounds]) -> tuple[tuple[float, ...], float]:
    """The alphas by position and the spread that make what was accepted of these texts the most likely. All texts have the same
    positions."""
    counts, found = Counter(texts), dict[float, _Fit]()

    def likelihood(spread: float) -> float:
        if spread not in found:
            found[spread] = _fit(counts, spread)
        return found[spread].likelihood

    low, high = 0.0, MAX_SPREAD
    for _ in range(_SEARCHES):
        lower, upper = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, upper) if likelihood(lower) >= likelihood(upper) else (lower, high)
    spread = max(found, key=likelihood)
    return tuple(fmean(alphas_around(median, spread)) for median in found[spread].medians), spread


@dataclass(frozen=True, slots=True)
class _Fit:
    likelihood: float
    """Logarithm."""
    medians: Sequence[float]
    """Log-odds of the median text, by position."""


def _fit(texts: Mapping[TextRounds, int], spread: float) -> _Fit:
    """The most likely medians for this spread. `texts` counts how often each text occurred."""
    tested, accepted = (
        [sum(map(mul, column, texts.values())) for column in zip(*rows, strict=True)]
        for rows in ([text.tested for text in texts], [text.accepted for text in texts])
    )
    medians = [log((yes + 0.5) / (all_ - yes + 0.5)) for all_, yes in zip(tested, accepted, strict=True)]
    total = 0.0
    for _ in range(_ROUNDS):
        alphas = [alphas_around(median, spread) for median in medians]
        total, by_kind = 0.0, [[0.0] * KINDS for _ in medians]
        for text, count in texts.items():
            shares, likelihood = _shares(text, alphas)
            total += count * likelihood
            for row, own in zip(by_kind, text.tested, strict=True):
                for kind, share in enumerate(shares):
                    row[kind] += count * own * share
        medians = [_median(row, yes, spread) for row, yes in zip(by_kind, accepted, strict=True)]
    return _Fit(total, medians)


def _median(tested: Sequence[float], accepted: float, spread: float) -> float:
    """The log-odds with which as many are expected as were accepted. `tested` has the tested drafts by kind."""
    return root(lambda median: sum(map(mul, tested, alphas_around(median, spread))) - accepted)


def _shares(text: TextRounds, alphas: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """How likely the text is of each kind, and the log-likelihood of what was accepted of it."""
    logs = [0.0] * KINDS
    for row, tested, accepted in zip(alphas, text.tested, text.accepted, strict=True):
        for kind, alpha in enumerate(row):
            logs[kind] += accepted * log(max(alpha, _LEAST)) + (tested - accepted) * log(max(1.0 - alpha, _LEAST))
    most = max(logs)
    odds = [exp(log_odds - most) for log_odds in logs]
    total = sum(odds)
    return [share / total for share in odds], most + log(total / KINDS)
