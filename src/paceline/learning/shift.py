"""Whether traffic has changed since a training, by the tokens of its outputs. Pure."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from paceline.server.learning.sample_ring import LearningSample


@dataclass(frozen=True, slots=True)
class ShiftLimits:
    min_samples: int = 8
    """Samples of each side that a test needs."""
    errors: float = 3.0
    """Standard errors by which the novelty of new samples must differ."""
    min_growth: float = 0.1
    """Least difference of novelty, as a share of tokens: many samples make any difference certain."""


def has_shifted(older: Sequence[LearningSample], newer: Sequence[LearningSample], limits: ShiftLimits) -> bool:
    """Whether outputs of `newer` are clearly more novel than those of `older` are to each other. The novelty of an output is
    the share of its tokens that no other output of `older` has."""
    holders = Counter[int]()
    for sample in older:
        holders.update(set(sample.output))
    usual = [_share(sample, holders, 1) for sample in older if sample.output]
    found = [_share(sample, holders, 0) for sample in newer if sample.output]
    if min(len(usual), len(found)) < max(2, limits.min_samples):
        return False
    growth = fmean(found) - fmean(usual)
    error = math.sqrt(variance(usual) / len(usual) + variance(found) / len(found))
    return growth > max(limits.min_growth, limits.errors * error)


def _share(sample: LearningSample, holders: Counter[int], most: int) -> float:
    """Share of the output's tokens that at most `most` samples have."""
    return sum(holders[token] <= most for token in sample.output) / len(sample.output)
