"""Chooses the verification outcomes that a draft worker prepares drafts for while the target verifies.

An outcome is the number of accepted drafts and the token that follows. With alpha_i the conditional acceptance of draft i and
S_j = prod_{i<=j} alpha_i:

    P(j accepted, then alternative r) = S_j (1 - alpha_{j+1}) odds_r      for j below the depth
    P(all K accepted, then the draft's own next token) = S_K alpha_{K+1}

All branches cost the same, so the most probable ones are chosen until the nodes are used up.

`ScoreGapAcceptance` is the probability that the target agrees with a drafted token, by its score gap. It is learned from
verified rounds. The gap of a drafted token is its score less the best score of all other tokens. Under coupled noise a target
with nearly the draft's logits chooses another token where the gap is small, and rarely where it is large. Gaps fall into a few
buckets with decaying counts. With m the mean agreement and r_b that of bucket b,

    logit P(agrees at position i) = logit alpha_i + logit r_b - logit m

so that a bucket without evidence, or one that holds all gaps, leaves alpha_i as it is.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig

MIN_PROBABILITY = 0.005
"""Outcomes below this are not drafted for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    accepted: int
    alternative: int
    """Rank of the following token among those that the draft did not choose: 0 for the most probable."""
    probability: float


def likely_outcomes(
    alphas: Sequence[float], odds: Sequence[float], offered: int, depth: int, nodes: int, continues: bool = True
) -> list[Outcome]:
    """The outcomes to draft for, most probable first, in addition to full acceptance, which continues the draft's own chain.

    `alphas` are by position, at least one; the last applies to all later positions. `odds[r]` is the probability that a token
    other than the draft's is alternative r. Each branch costs `depth` of the `nodes`, and so does the continued chain, which
    comes first. `continues` is false under rejection, where the token after full acceptance is an independent sample, so that
    the chain does not continue.
    """
    branches = nodes // depth - 1 if depth else 0
    if branches <= 0:
        return []
    likely, survival = [], 1.0
    for accepted in range(offered + 1):
        alpha = alphas[min(accepted, len(alphas) - 1)]
        ends = survival if accepted == offered and not continues else survival * (1.0 - alpha)
        for alternative, chance in enumerate(odds):
            if ends * chance >= MIN_PROBABILITY:
                likely.append((-ends * chance, accepted, alternative))
        survival *= alpha
    likely.sort()
    return [Outcome(accepted, alternative, -negative) for negative, accepted, alternative in likely[:branches]]


class AlternativeOdds:
    """Probability that the token in place of a draft's is alternative 0, 1, …; a decaying mean over outcomes."""

    PRIOR = (0.4, 0.15, 0.08, 0.05)

    def __init__(self, window: float = 256.0) -> None:
        if window <= 1.0:
            raise InvalidConfig(f"window must be more than 1 outcome, got {window}")
        self._keep = 1.0 - 1.0 / window
        self._total = 8.0
        self._counts = [chance * self._total for chance in self.PRIOR]

    def observe(self, alternative: int | None) -> None:
        """`alternative` is the rank of the token, None if it is not among the alternatives."""
        self._total = self._total * self._keep + 1.0
        self._counts = [count * self._keep for count in self._counts]
        if alternative is not None and alternative < len(self._counts):
            self._counts[alternative] += 1.0

    @property
    def odds(self) -> tuple[float, ...]:
        return tuple(count / self._total for count in self._counts)


EDGES = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Bounds of the buckets, in logits."""
PRIOR_TOKENS = 4.0
"""Weight, in tokens, of the mean agreement in every bucket."""
MIN_GAP_PROBABILITY = 0.002
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
    clamped = min(max(probability, MIN_GAP_PROBABILITY), 1.0 - MIN_GAP_PROBABILITY)
    return math.log(clamped / (1.0 - clamped))
