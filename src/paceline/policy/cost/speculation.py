"""What speculation gains: expected tokens of a round, and their rate over that of plain decoding.

alpha is conditional by position: accepted, given that all earlier drafts were. Units are seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.policy.cost.curve import Curve


def survival(alphas: Sequence[float], depth: int) -> list[float]:
    """[depth] S_k = prod_{j<=k} alpha_j: the tokens that draft k adds. The last alpha applies to all later positions."""
    chances, chance = [], 1.0
    for k in range(depth):
        chance *= alphas[min(k, len(alphas) - 1)]
        chances.append(chance)
    return chances


def expected_tokens(alphas: Sequence[float], depth: int) -> float:
    """E = 1 + sum_k S_k; for one alpha everywhere, (1 - a^(K+1)) / (1 - a)."""
    return 1.0 + sum(survival(alphas, depth))


def mean_alpha(alphas: Sequence[float], depth: int) -> float:
    """Accepted / tested drafts of a chain: sum_k S_k / sum_k S_{k-1}, S_0 = 1."""
    chances = survival(alphas, depth)
    return sum(chances) / (1.0 + sum(chances[:-1])) if depth else 0.0


class StepCosts(Protocol):
    """Seconds of the parts of a step, from any source."""

    def verify(self, rows: int, context: float) -> float:
        """Seconds of a pass over `rows` rows of sequences with `context` tokens in all. A plain step has one row for each
        sequence."""
        ...

    def draft(self, batch: int, depth: int) -> float:
        """Seconds that a batch waits for drafts of `depth` tokens, the network included."""
        ...


def speedup(costs: StepCosts, alphas: Sequence[float], batch: int, depth: int, context: float = 0.0) -> float:
    """Speed over plain decoding: E t_verify(B) / (t_draft(B, K) + t_verify(B (K + 1)))."""
    seconds = costs.draft(batch, depth) + costs.verify(batch * (depth + 1), context)
    return expected_tokens(alphas, depth) / seconds * costs.verify(batch, context)


@dataclass(frozen=True, slots=True)
class GivenCosts:
    """Costs from few values, between which they are linear and beyond which they are constant."""

    passes: Mapping[int, float]
    """Seconds of a pass by rows."""
    drafts: Mapping[int, float]
    """Seconds that a round waits for its drafts, by depth."""

    def verify(self, rows: float, context: float = 0.0) -> float:
        return Curve(self.passes.items(), "flat")(rows)

    def draft(self, batch: int, depth: int) -> float:
        return Curve(self.drafts.items(), "flat")(depth)
