"""Acceptance per traffic class, learned from rounds with decay: alpha by position, and the probability of each node.

alpha_i is the probability that draft i is accepted given that drafts 1..i-1 were. A round that drafted K and accepted n
tests positions 1..n (accepted) and n+1 (rejected, if n < K). Later positions were not tested: they are censored,
not failures. accepted / drafted is another figure, for dashboards; nothing here uses it.

The value of a draft is the acceptance probability of each of its nodes, in draft order. For a chain that is
S_k = alpha_1 ... alpha_k. The nodes of a tree compete, so there is no such product: P(r) of node r is the share of
rounds with more than r nodes whose accepted path contains it. Proposers return the best nodes first, so that P falls
with r, and a tree cut after n nodes is expected to yield 1 + sum_{r<n} P(r) tokens.

A proposer may return no draft for a request. That is no rejection: `delivery` counts it separately.

Every round of a traffic class ages the evidence on all its positions, tested or not. A position without recent evidence
drifts to the alpha of the position before it, so that a depth that was once bad is tried again. A node of a tree
drifts to an extrapolation of the nodes before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Generic, TypeVar

from paceline.core.errors import InvalidConfig

PRIOR_ALPHA = 0.7
PRIOR_ROUNDS = 4.0
"""Weight, in rounds, of the prior and of the position before."""
STALE_ROUNDS = 8.0
"""Weight, in rounds, of old evidence during a probe."""
_REBASE = 1e100

Key = TypeVar("Key")
"""What acceptance is told apart by: a traffic class, or the kind of a draft."""


def known_positions(drafted: int, accepted: int) -> int:
    """Positions of a round that were tested."""
    return min(drafted, accepted + 1)


@dataclass(slots=True)
class _Evidence:
    hits: list[float]  # by position
    trials: list[float]
    found: list[float]  # by node: rounds that accepted it
    sizes: list[float]  # by number of nodes less one: rounds with as many
    is_tree: bool = False
    # Weight of a new observation. It grows, so that older sums need not shrink.
    unit: float = 1.0
    delivered: float = PRIOR_ROUNDS
    requested: float = PRIOR_ROUNDS
    survival: tuple[float, ...] | None = None


class Acceptance(Generic[Key]):
    """The only writer of alpha. `window` is the number of rounds of a traffic class that the estimate remembers."""

    def __init__(self, max_depth: int, window: float = 128.0) -> None:
        if max_depth < 1 or window <= 1.0:
            raise InvalidConfig(f"acceptance needs max_depth >= 1 and window > 1; got {max_depth}, {window}")
        self._max_depth = max_depth
        self._growth = window / (window - 1.0)
        self._classes: dict[Key, _Evidence] = {}

    def observe(
        self,
        key: Key,
        drafted: int,
        accepted: int,
        requested: int = 0,
        num_nodes: int | None = None,
        path: Sequence[int] | None = None,
        age: float = 1.0,
    ) -> None:
        """Learn from the levels that one round drafted and accepted, and from the number of nodes and the accepted path of a
        tree. A round with neither a request nor a draft changes nothing. `age` is the share of a round by which older rounds
        decay."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"accepted must be in [0, drafted], got {accepted} of {drafted}")
        if drafted == 0 and requested == 0:
            return
        evidence = self._evidence(key)
        evidence.survival = None
        evidence.unit *= self._growth**age
        unit = evidence.unit
        evidence.requested += unit
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

    def discount(self, key: Key) -> None:
        """Reduce the weight of old evidence before a probe, so that the probe can outweigh it."""
        evidence = self._evidence(key)
        limit = STALE_ROUNDS * evidence.unit
        if evidence.requested > limit:
            evidence.delivered *= limit / evidence.requested
            evidence.requested = limit
        for i, trials in enumerate(evidence.trials):
            if trials > limit:
                evidence.hits[i] *= limit / trials
                evidence.trials[i] = limit
        rounds = sum(evidence.sizes)
        if rounds > limit:
            evidence.found = [found * limit / rounds for found in evidence.found]
            evidence.sizes = [size * limit / rounds for size in evidence.sizes]
        evidence.survival = None

    def restart(self, key: Key, alpha: float) -> None:
        """Discard what was learned of the traffic class; its first drafts are now accepted with probability `alpha`. Later
        positions start equal to the first. `delivery` is kept."""
        old = self._evidence(key)
        new = self._new_evidence(alpha, STALE_ROUNDS)
        new.is_tree = old.is_tree
        new.delivered *= old.delivered / old.requested
        self._classes[key] = new

    def alphas(self, key: Key) -> tuple[float, ...]:
        """[max_depth] conditional acceptance by position, a tree's levels; entry 0 is the first draft."""
        evidence = self._evidence(key)
        weight = PRIOR_ROUNDS * evidence.unit
        alphas = [evidence.hits[0] / evidence.trials[0]]
        for hits, trials in zip(evidence.hits[1:], evidence.trials[1:], strict=True):
            alphas.append((hits + weight * alphas[-1]) / (trials + weight))
        return tuple(alphas)

    def survival(self, key: Key) -> tuple[float, ...]:
        """[max_depth] probability that the k-th drafted node is accepted: the expected tokens that it adds. Never increases
        with k; for a chain prod_{j<=k} alpha_j."""
        evidence = self._evidence(key)
        if evidence.survival is None:
            if evidence.is_tree:
                evidence.survival = tuple(_non_increasing(_node_probabilities(evidence)))
            else:
                evidence.survival = tuple(accumulate(self.alphas(key), mul))
        return evidence.survival

    def delivery(self, key: Key) -> float:
        """The probability that a request for drafts returns any."""
        evidence = self._evidence(key)
        return evidence.delivered / evidence.requested

    def _evidence(self, key: Key) -> _Evidence:
        evidence = self._classes.get(key)
        if evidence is None:
            evidence = self._classes[key] = self._new_evidence(PRIOR_ALPHA, PRIOR_ROUNDS)
        return evidence

    def _new_evidence(self, alpha: float, rounds: float) -> _Evidence:
        nothing = [0.0] * (self._max_depth - 1)
        hits, trials = [alpha * rounds, *nothing], [rounds, *nothing]
        return _Evidence(hits, trials, list(hits), list(trials))


def _node_probabilities(evidence: _Evidence) -> list[float]:
    """P(r) = found / drafted over the nodes from 3/4 r to 5/4 r together: a late node alone, found once in a hundred
    rounds, would be noise. A node with little evidence is extrapolated from the last step or from the whole curve, whichever
    falls less: one odd node must not hide all later ones."""
    weight = PRIOR_ROUNDS * evidence.unit
    drafted = list(accumulate(reversed(evidence.sizes)))[::-1]
    found_before = [0.0, *accumulate(evidence.found)]
    drafted_before = [0.0, *accumulate(drafted)]
    values = [evidence.found[0] / drafted[0]]
    before, count = 1.0, len(drafted)
    for r in range(1, count):
        last = values[-1]
        ratio = max(min(1.0, last / before) if before > 0.0 else 0.0, last ** (1.0 / r))
        low, high = r - r // 4, min(count, r + r // 4 + 1)
        found = found_before[high] - found_before[low]
        tried = drafted_before[high] - drafted_before[low]
        values.append((found + weight * last * ratio) / (tried + weight))
        before = last
    return values


def _non_increasing(values: Sequence[float]) -> list[float]:
    """The closest non-increasing values: neighbours out of order share their mean."""
    blocks: list[tuple[float, int]] = []  # mean, count
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
    evidence.requested *= factor
    evidence.unit *= factor
