"""Chooses the verification outcomes that a draft worker prepares drafts for while the target verifies.

An outcome is the number of accepted drafts and the token that follows. With alpha_i the conditional acceptance of draft i and
S_j = prod_{i<=j} alpha_i:

    P(j accepted, then alternative r) = S_j (1 - alpha_{j+1}) odds_r      for j below the depth
    P(all K accepted, then the draft's own next token) = S_K alpha_{K+1}

All branches cost the same, so the most probable ones are chosen until the nodes are used up.
"""

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
