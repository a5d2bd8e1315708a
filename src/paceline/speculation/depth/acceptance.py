"""Alpha by position and the chances of a draft's nodes, per traffic category, learned from rounds and slowly forgotten.

alpha_i is the chance that draft i is accepted given that drafts 1..i-1 were. A round that drafted K and accepted n
tests positions 1..n (accepted) and n+1 (rejected, if n < K). Later positions were never looked at: they are censored,
not failures. accepted / drafted is another figure, for dashboards; nothing here uses it.

What a draft is worth is the chance of each of its nodes, in the order drafted, to be accepted. Of a chain that is
S_k = alpha_1 ... alpha_k. A tree's nodes compete, so there is no such product: the chance of node r is the share of
rounds with more than r nodes whose accepted path held it. Proposers give the best nodes first, so that these chances
fall with r, and a tree cut after n nodes is expected to yield 1 + sum_{r<n} P(r) tokens.

A proposer may be asked and have nothing to offer. That is no rejection: `delivery` counts it apart.

Every round of a category ages the evidence on all its positions, tested or not. A position without fresh evidence
drifts to the alpha of the position before it, so a depth that was once bad is tried again. A node of a tree drifts
to where the nodes before it point.
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
    hits: list[float]  # by position
    trials: list[float]
    found: list[float]  # by node: rounds that accepted it
    sizes: list[float]  # by number of nodes less one: rounds that drafted so many
    is_tree: bool = False
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

    def observe(
        self,
        category: str,
        drafted: int,
        accepted: int,
        asked: int = 0,
        num_nodes: int | None = None,
        path: Sequence[int] | None = None,
        age: float = 1.0,
    ) -> None:
        """Learn from one round: the levels drafted and how many of them were accepted; of a tree also how many nodes it
        had and which were accepted. A round that neither asked for drafts nor got any says nothing. `age`: the share of a
        round by which earlier ones are forgotten."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted must be in [0, drafted], got {accepted} of {drafted}")
        if drafted == 0 and asked == 0:
            return
        evidence = self._evidence(category)
        evidence.survival = None
        evidence.unit *= self._growth**age
        unit = evidence.unit
        evidence.asked += unit
        evidence.delivered += unit if drafted else 0.0
        for i in range(min(known_positions(drafted, accepted), self._max_depth)):
            evidence.trials[i] += unit
            if i < accepted:
                evidence.hits[i] += unit
        size = drafted if num_nodes is None else num_nodes
        if size:
            evidence.is_tree |= size > drafted
            evidence.sizes[min(size, self._max_depth) - 1] += unit
        for node in range(accepted) if path is None else path:
            if node < self._max_depth:
                evidence.found[node] += unit
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
        rounds = sum(evidence.sizes)
        if rounds > limit:
            evidence.found = [found * limit / rounds for found in evidence.found]
            evidence.sizes = [size * limit / rounds for size in evidence.sizes]
        evidence.survival = None

    def restart(self, category: str, alpha: float) -> None:
        """Forget what was learned of the category; its first drafts are now accepted with chance `alpha`. Later positions
        are taken to be like the first until they were seen. Whether there are drafts at all is another question."""
        old = self._evidence(category)
        new = self._new_evidence(alpha, STALE_ROUNDS)
        new.is_tree = old.is_tree
        new.delivered *= old.delivered / old.asked
        self._categories[category] = new

    def alphas(self, category: str) -> tuple[float, ...]:
        """[max_depth] conditional acceptance by position, a tree's levels; entry 0 is the first draft."""
        evidence = self._evidence(category)
        weight = PRIOR_ROUNDS * evidence.unit
        alphas = [evidence.hits[0] / evidence.trials[0]]
        for hits, trials in zip(evidence.hits[1:], evidence.trials[1:], strict=True):
            alphas.append((hits + weight * alphas[-1]) / (trials + weight))
        return tuple(alphas)

    def survival(self, category: str) -> tuple[float, ...]:
        """[max_depth] the chance that the k-th node drafted is accepted: the expected tokens it adds. Never increases
        with k; of a chain it is prod_{j<=k} alpha_j."""
        evidence = self._evidence(category)
        if evidence.survival is None:
            if evidence.is_tree:
                evidence.survival = tuple(_falling(_chances(evidence)))
            else:
                evidence.survival = tuple(accumulate(self.alphas(category), mul))
        return evidence.survival

    def delivery(self, category: str) -> float:
        """The chance that a proposer asked for drafts has any."""
        evidence = self._evidence(category)
        return evidence.delivered / evidence.asked

    def _evidence(self, category: str) -> _Evidence:
        evidence = self._categories.get(category)
        if evidence is None:
            evidence = self._categories[category] = self._new_evidence(self._prior, PRIOR_ROUNDS)
        return evidence

    def _new_evidence(self, alpha: float, rounds: float) -> _Evidence:
        nothing = [0.0] * (self._max_depth - 1)
        hits, trials = [alpha * rounds, *nothing], [rounds, *nothing]
        return _Evidence(hits, trials, list(hits), list(trials))


def _chances(evidence: _Evidence) -> list[float]:
    """P(r) = found / offered, over the nodes from 3/4 r to 5/4 r together: alone the late ones, found once in a hundred
    rounds, would be all noise. A node seldom offered goes on as those before it fell: from the last to it, or on the
    whole, whichever is less steep, since one odd node must not hide all that come after it."""
    weight = PRIOR_ROUNDS * evidence.unit
    offered = list(accumulate(reversed(evidence.sizes)))[::-1]
    found_before = [0.0, *accumulate(evidence.found)]
    offered_before = [0.0, *accumulate(offered)]
    chances = [evidence.found[0] / offered[0]]
    before, count = 1.0, len(offered)
    for r in range(1, count):
        last = chances[-1]
        ratio = max(min(1.0, last / before) if before > 0.0 else 0.0, last ** (1.0 / r))
        low, high = r - r // 4, min(count, r + r // 4 + 1)
        found = found_before[high] - found_before[low]
        tried = offered_before[high] - offered_before[low]
        chances.append((found + weight * last * ratio) / (tried + weight))
        before = last
    return chances


def _falling(values: Sequence[float]) -> list[float]:
    """The closest values that never rise: neighbours out of order share their mean."""
    blocks: list[tuple[float, int]] = []  # mean, how many
    for mean in values:
        size = 1
        while blocks and blocks[-1][0] < mean:
            earlier, count = blocks.pop()
            mean = (mean * size + earlier * count) / (size + count)
            size += count
        blocks.append((mean, size))
    return [mean for mean, size in blocks for _ in range(size)]


def _scale(evidence: _Evidence, factor: float) -> None:
    evidence.hits = [hits * factor for hits in evidence.hits]
    evidence.trials = [trials * factor for trials in evidence.trials]
    evidence.found = [found * factor for found in evidence.found]
    evidence.sizes = [size * factor for size in evidence.sizes]
    evidence.delivered *= factor
    evidence.asked *= factor
    evidence.unit *= factor
