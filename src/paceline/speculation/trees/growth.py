"""A tree grown best first, as EAGLE-2 does: a node is worth the product of the confidences on its path.

A child is never worth more than its parent, so the best nodes are closed under parents, and a node outside the best
has no descendant among them.
"""

import heapq
import math
from collections.abc import Iterable, Sequence

import torch

from paceline.speculation.drafts import NO_COST, DraftBatch, DraftCost


class Growth:
    """Candidates of one sequence, of which the best `budget` become its draft."""

    def __init__(self, budget: int, max_levels: int | None = None) -> None:
        self.budget, self._max_levels = budget, max_levels
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._values: list[float] = []  # log of the product of confidences
        self._levels: list[int] = []

    def add(self, parent: int, branches: Iterable[tuple[int, float]]) -> range:
        """Children of `parent` (-1: the root): (token, log confidence). Returns their nodes; -inf is a node never drafted."""
        first = len(self.tokens)
        value, level = (self._values[parent], self._levels[parent]) if parent >= 0 else (0.0, 0)
        for token, confidence in branches:
            self.tokens.append(token)
            self.parents.append(parent)
            self._values.append(value + min(confidence, 0.0))
            self._levels.append(level + 1)
        return range(first, len(self.tokens))

    def frontier(self, level: int, width: int) -> list[int]:
        """Nodes of `level` whose children may still be among the best, at most `width`, best first."""
        if self._max_levels is not None and level >= self._max_levels:
            return []
        # Where `budget` nodes are worth as much as a node, itself included, no child of it gets in
        best = self._ranked(self.budget - 1)
        return [node for node in best if self._levels[node] == level][:width]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def draft(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the best `budget` nodes, best first: whoever cuts it short keeps the better part."""
        kept = [node for node in self._ranked(self.budget) if self._values[node] > -math.inf]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return [self.tokens[node] for node in kept], [place[self.parents[node]] for node in kept]

    def _ranked(self, count: int) -> list[int]:
        """Equal values in order of birth, so that a parent precedes its children."""
        return heapq.nsmallest(count, range(len(self.tokens)), key=lambda node: (-self._values[node], node))


def tree_batch(trees: Sequence[tuple[int, Growth]], cost: DraftCost = NO_COST) -> DraftBatch:
    """Drafts of (sequence id, growth) pairs, one-hot."""
    drafts = [(sequence_id, *growth.draft()) for sequence_id, growth in trees]
    drafts = [draft for draft in drafts if draft[1]]
    return DraftBatch(
        tuple(sequence_id for sequence_id, _, _ in drafts),
        tuple(len(tokens) for _, tokens, _ in drafts),
        torch.tensor([token for _, tokens, _ in drafts for token in tokens], dtype=torch.int64),
        torch.tensor([parent for _, _, parents in drafts for parent in parents], dtype=torch.int64),
        cost=cost,
    )
