"""Alpha by position, per traffic category, learned from rounds and slowly forgotten.

alpha_i is the chance that draft i is accepted given that drafts 1..i-1 were. A round that drafted K and accepted n
tests positions 1..n (accepted) and n+1 (rejected, if n < K). Later positions were never looked at: they are censored,
not failures. accepted / drafted is another figure, for dashboards; nothing here uses it.

A proposer may be asked and have nothing to offer. That is no rejection: `delivery` counts it apart.

Every round of a category ages the evidence on all its positions, tested or not. A position without fresh evidence
drifts to the alpha of the position before it, so a depth that was once bad is tried again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paceline.core.errors import InvalidConfig

PRIOR_ALPHA = 0.7
PRIOR_ROUNDS = 4.0
"""Rounds of evidence that the prior, and a position's predecessor, are worth."""
STALE_ROUNDS = 8.0
"""What old evidence is worth beside a probe."""
_REBASE = 1e100


def expected_tokens(alphas: Sequence[float], depth: int) -> float:
    """E = 1 + sum_k prod_{j<=k} alpha_j; for one alpha everywhere, (1 - a^(K+1)) / (1 - a)."""
    survival, tokens = 1.0, 1.0
    for alpha in alphas[:depth]:
        survival *= alpha
        tokens += survival
    return tokens


def known_positions(drafted: int, accepted: int) -> int:
    """Positions of a round whose fate is known."""
    return min(drafted, accepted + 1)


@dataclass(slots=True)
class _Evidence:
    hits: list[float]
    trials: list[float]
    # What one new observation weighs. It grows where older sums would otherwise have to shrink.
    unit: float = 1.0
    delivered: float = PRIOR_ROUNDS
    asked: float = PRIOR_ROUNDS
    survival: tuple[float, ...] | None = None


class Acceptance:
    """The only writer of alpha. `window` is how many rounds of a category the estimate remembers."""

    def __init__(self, max_depth: int, window: float = 128.0, prior: float = PRIOR_ALPHA) -> None:
        if max_depth < 1 or window <= 1.0 or not 0.0 <= prior <= 1.0:
            raise InvalidConfig(
                f"acceptance needs max_depth >= 1, window > 1 and a prior in [0, 1]; got {max_depth}, {window}, {prior}"
            )
        self._max_depth = max_depth
        self._growth = window / (window - 1.0)
        self._prior = prior
        self._categories: dict[str, _Evidence] = {}

    def observe(self, category: str, drafted: int, accepted: int, asked: int = 0) -> None:
        """Learn from one round. A round that neither asked for drafts nor got any says nothing."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted must be in [0, drafted], got {accepted} of {drafted}")
        if drafted == 0 and asked == 0:
            return
        evidence = self._evidence(category)
        evidence.survival = None
        evidence.unit *= self._growth
        unit = evidence.unit
        evidence.asked += unit
        evidence.delivered += unit if drafted else 0.0
        for i in range(min(known_positions(drafted, accepted), self._max_depth)):
            evidence.trials[i] += unit
            if i < accepted:
                evidence.hits[i] += unit
        if unit > _REBASE:
            _scale(evidence, 1.0 / unit)

    def loosen(self, category: str) -> None:
        """Before a probe: what was learned long ago must not outvote what is about to be seen."""
        evidence = self._evidence(category)
        limit = STALE_ROUNDS * evidence.unit
        if evidence.asked > limit:
            evidence.delivered *= limit / evidence.asked
            evidence.asked = limit
        for i, trials in enumerate(evidence.trials):
            if trials > limit:
                evidence.hits[i] *= limit / trials
                evidence.trials[i] = limit
        evidence.survival = None

    def alphas(self, category: str) -> tuple[float, ...]:
        """[max_depth] conditional acceptance by position; entry 0 is the first draft."""
        evidence = self._evidence(category)
        weight = PRIOR_ROUNDS * evidence.unit
        alphas = [evidence.hits[0] / evidence.trials[0]]
        for hits, trials in zip(evidence.hits[1:], evidence.trials[1:], strict=True):
            alphas.append((hits + weight * alphas[-1]) / (trials + weight))
        return tuple(alphas)

    def survival(self, category: str) -> tuple[float, ...]:
        """[max_depth] prod_{j<=k} alpha_j: the expected tokens that draft k adds. Never increases with k."""
        evidence = self._evidence(category)
        if evidence.survival is None:
            evidence.survival = tuple(accumulate(self.alphas(category), mul))
        return evidence.survival

    def delivery(self, category: str) -> float:
        """The chance that a proposer asked for drafts has any."""
        evidence = self._evidence(category)
        return evidence.delivered / evidence.asked

    def _evidence(self, category: str) -> _Evidence:
        evidence = self._categories.get(category)
        if evidence is None:
            nothing = [0.0] * (self._max_depth - 1)
            evidence = _Evidence([self._prior * PRIOR_ROUNDS, *nothing], [PRIOR_ROUNDS, *nothing])
            self._categories[category] = evidence
        return evidence


def _scale(evidence: _Evidence, factor: float) -> None:
    evidence.hits = [hits * factor for hits in evidence.hits]
    evidence.trials = [trials * factor for trials in evidence.trials]
    evidence.delivered *= factor
    evidence.asked *= factor
    evidence.unit *= factor
