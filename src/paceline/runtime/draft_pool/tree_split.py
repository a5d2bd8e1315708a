"""How many nodes of a draft continue its chain, and how many are alternatives to the tokens of the chain.

The k-th token of a chain is accepted with probability S_k, the r-th alternative with P(r): a worker sends the most likely
alternatives first. S and P are learned from verified rounds and fall with k and r, so the n best nodes are those with the n
largest of all these values.
"""

from collections.abc import Sequence

from paceline.runtime.draft_worker.branches import BranchKey
from paceline.runtime.wire.messages import MAX_DEPTH
from paceline.speculation.depth.acceptance import Acceptance
from paceline.speculation.drafts import DraftTree

PROBE_EVERY = 16
"""Rounds of which one has an alternative more: an alternative that is never verified is never learned of."""
_CHAIN, _ALTERNATIVES = "chain", "alternatives"


class TreeSplit:
    """Learns by `observe`. It is pure: it uses no clock and no random numbers."""

    def __init__(self) -> None:
        self._acceptance = Acceptance[str](MAX_DEPTH)
        self._rounds = 0

    def observe(self, chain: Sequence[int], alternatives: Sequence[BranchKey], committed: Sequence[int]) -> None:
        """Learn from a round: the tokens that it committed, and the draft that was verified."""
        matched, end = 0, min(len(chain), len(committed))
        while matched < end and chain[matched] == committed[matched]:
            matched += 1
        if chain:
            self._acceptance.observe(_CHAIN, len(chain), matched)
        if alternatives:
            key = BranchKey(matched, committed[matched]) if matched < len(committed) else None
            path = [rank for rank, alternative in enumerate(alternatives) if alternative == key]
            self._acceptance.observe(
                _ALTERNATIVES,
                1,
                len(path),
                num_nodes=len(alternatives),
                path=[min(rank, MAX_DEPTH - 1) for rank in path],
            )

    def split(self, nodes: int, max_depth: int) -> tuple[int, int]:
        """(tokens of the chain, alternatives) of a draft of `nodes` nodes, whose chain has at most `max_depth` tokens."""
        self._rounds += 1
        survival, others = self._acceptance.survival(_CHAIN), self._acceptance.survival(_ALTERNATIVES)
        depth = min(1, nodes, max_depth)
        while depth < min(nodes, max_depth) and survival[depth] >= others[nodes - depth - 1]:
            depth += 1
        if self._rounds % PROBE_EVERY == 0 and depth == nodes > 1:
            depth -= 1
        return depth, nodes - depth

    def tree(self, chain: Sequence[int], alternatives: Sequence[BranchKey]) -> DraftTree:
        """The nodes of the chain and of the alternatives, best first."""
        survival, others = self._acceptance.survival(_CHAIN), self._acceptance.survival(_ALTERNATIVES)
        # Of equal values the chain comes first: a parent precedes its children
        nodes = [(-survival[k], 0, k, k - 1, token) for k, token in enumerate(chain)]
        for rank, (accepted, token) in enumerate(alternatives):
            value = min(others[rank], survival[accepted - 1]) if accepted else others[rank]
            nodes.append((-value, 1, rank, accepted - 1, token))
        nodes.sort()
        place = {k: i for i, (_, is_alternative, k, _, _) in enumerate(nodes) if not is_alternative} | {-1: -1}
        return DraftTree(tuple(token for *_, token in nodes), tuple(place[parent] for *_, parent, _ in nodes))
