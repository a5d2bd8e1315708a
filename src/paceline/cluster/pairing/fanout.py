"""Which outcomes of a verification a draft worker prepares for while the target is still verifying.

An outcome is how many drafts are accepted and which token follows. With alpha_i the chance that draft i is accepted given
those before it, S_j = prod_{i<=j} alpha_i:

    P(j accepted, then rival r) = S_j (1 - alpha_{j+1}) odds_r      for j below the depth
    P(all K accepted, then the draft's own next token) = S_K alpha_{K+1}

Branches are worth their probability and cost the same, so the likeliest are taken until the nodes are spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidConfig

FLOOR = 0.005
"""An outcome less likely than this is not worth a row."""


@dataclass(frozen=True, slots=True)
class Outcome:
    accepted: int
    rival: int
    """0 for the likeliest token that is not the draft's own, 1 for the next."""
    probability: float


def fan_out(
    alphas: Sequence[float], odds: Sequence[float], offered: int, depth: int, nodes: int, continues: bool = True
) -> list[Outcome]:
    """The outcomes to draft on from, likeliest first, beside the full acceptance that the draft's own chain continues.

    `alphas` by position, at least one; the last holds for all after it. `odds[r]`: the chance that a token which is not the
    draft's is rival r. Each branch costs `depth` of the `nodes`, and so does the continued chain, which comes first.
    `continues=False`: the token after a full acceptance is drawn apart (rejection), so the chain says nothing about it.
    """
    branches = nodes // depth - 1 if depth else 0
    if branches <= 0:
        return []
    outcomes, survival = [], 1.0
    for accepted in range(offered + 1):
        alpha = alphas[min(accepted, len(alphas) - 1)]
        ends = survival if accepted == offered and not continues else survival * (1.0 - alpha)
        outcomes += [Outcome(accepted, rival, ends * chance) for rival, chance in enumerate(odds)]
        survival *= alpha
    likely = [outcome for outcome in outcomes if outcome.probability >= FLOOR]
    return sorted(likely, key=lambda outcome: -outcome.probability)[:branches]


class RivalOdds:
    """How often the token that took the place of a draft's was its rival 0, 1, …; learned from outcomes, slowly forgotten."""

    PRIOR = (0.4, 0.15, 0.08, 0.05)

    def __init__(self, window: float = 256.0) -> None:
        if window <= 1.0:
            raise InvalidConfig(f"window must be more than 1 outcome, got {window}")
        self._keep = 1.0 - 1.0 / window
        self._total = 8.0
        self._counts = [chance * self._total for chance in self.PRIOR]

    def observe(self, rival: int | None) -> None:
        """None: it was none of them."""
        self._total = self._total * self._keep + 1.0
        self._counts = [count * self._keep for count in self._counts]
        if rival is not None and rival < len(self._counts):
            self._counts[rival] += 1.0

    @property
    def odds(self) -> tuple[float, ...]:
        return tuple(count / self._total for count in self._counts)
