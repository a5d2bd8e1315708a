"""Probability that the target agrees with a drafted token, by its score gap. It is learned from verified rounds.

The gap of a drafted token is its score less the best score of all other tokens. Under coupled noise a target with nearly the
draft's logits chooses another token where the gap is small, and rarely where it is large. Gaps fall into a few buckets with
decaying counts. With m the mean agreement and r_b that of bucket b,

    logit P(agrees at position i) = logit alpha_i + logit r_b - logit m

so that a bucket without evidence, or one that holds all gaps, leaves alpha_i as it is.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence

from paceline.core.errors import InvalidConfig

EDGES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Bounds of the buckets, in logits."""
PRIOR_TOKENS = 4.0
"""Weight, in tokens, of the mean agreement in every bucket."""
MIN_PROBABILITY = 0.002
"""Distance of all probabilities from 0 and 1."""


class ScoreGapAcceptance:
    """The counts remember the last `window` rounds."""

    def __init__(self, window: float = 256.0) -> None:
        if window <= 1.0:
            raise InvalidConfig(f"window must be more than 1 round, got {window}")
        self._keep = 1.0 - 1.0 / window
        self._agreed = [0.0] * (len(EDGES) + 1)
        self._tested = [0.0] * (len(EDGES) + 1)
        self._shifts: list[float] | None = None

    def observe(self, gaps: Sequence[float | None], accepted: int) -> None:
        """Learn from a round: the gaps of its drafted tokens, of which the target agreed with the first `accepted` and not
        with the next. Later ones were not tested. A gap that is None or NaN is unknown."""
        tested = [(bucket, i < accepted) for i, gap in enumerate(gaps[: accepted + 1]) if (bucket := _bucket(gap)) >= 0]
        if not tested:
            return
        self._agreed = [count * self._keep for count in self._agreed]
        self._tested = [count * self._keep for count in self._tested]
        for bucket, agreed in tested:
            self._tested[bucket] += 1.0
            self._agreed[bucket] += agreed
        self._shifts = None

    def alpha(self, average: float, gap: float | None) -> float:
        """The probability that the target agrees with a token of this gap, where it agrees with `average` of all tokens at
        that position."""
        bucket = _bucket(gap)
        if bucket < 0:
            return average
        if self._shifts is None:
            self._shifts = self._learn_shifts()
        shift = self._shifts[bucket]
        return average if shift == 0.0 else 1.0 / (1.0 + math.exp(-_logit(average) - shift))

    def _learn_shifts(self) -> list[float]:
        """logit r_b - logit m of every bucket."""
        total = sum(self._tested)
        if total == 0.0:
            return [0.0] * len(self._tested)
        mean = sum(self._agreed) / total
        return [
            _logit((agreed + PRIOR_TOKENS * mean) / (tested + PRIOR_TOKENS)) - _logit(mean) if tested < total else 0.0
            for agreed, tested in zip(self._agreed, self._tested, strict=True)
        ]


def _bucket(gap: float | None) -> int:
    """The bucket of a gap. -1 if the gap is unknown."""
    return -1 if gap is None or math.isnan(gap) else bisect_right(EDGES, gap)


def _logit(probability: float) -> float:
    clamped = min(max(probability, MIN_PROBABILITY), 1.0 - MIN_PROBABILITY)
    return math.log(clamped / (1.0 - clamped))
