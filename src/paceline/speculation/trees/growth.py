"""A tree grown best first, as in EAGLE-2: the value of a node is the product of the confidences on its path.

The value of a child is at most that of its parent. The best nodes are therefore closed under parents, and a node outside the
best has no descendant among them.
"""

import heapq
import math
from collections.abc import Iterable

from paceline.kernels.eagle_head import MAX_TREE_SLOTS
from paceline.speculation.drafts import DraftTree


class Growth:
    """Candidate nodes of one sequence; the best `budget` become its draft."""

    def __init__(self, budget: int, max_levels: int | None = None) -> None:
        self.budget, self._max_levels = budget, max_levels
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._values: list[float] = []  # log of the product of confidences
        self._levels: list[int] = []

    def add(self, parent: int, branches: Iterable[tuple[int, float]]) -> range:
        """Add children of `parent` (-1: the root) as (token, log confidence). Returns their nodes; -inf is never drafted."""
        first = len(self.tokens)
        value, level = (self._values[parent], self._levels[parent]) if parent >= 0 else (0.0, 0)
        for token, confidence in branches:
            self.tokens.append(token)
            self.parents.append(parent)
            self._values.append(value + min(confidence, 0.0))
            self._levels.append(level + 1)
        return range(first, len(self.tokens))

    def frontier(self, level: int, width: int) -> list[int]:
        """At most `width` nodes of `level` whose children may be among the best, best first; at most `MAX_TREE_SLOTS` nodes of
        a tree get children."""
        if self._max_levels is not None and level >= self._max_levels:
            return []
        # If `budget` nodes, itself included, have at least its value, no child of it is among the best
        best = self._ranked(self.budget - 1)
        left = MAX_TREE_SLOTS + 1 - len({-1, *self.parents})
        return [node for node in best if self._levels[node] == level][: min(width, left)]

    def path(self, node: int) -> tuple[int, ...]:
        """Tokens from the root's child down to `node`."""
        tokens = []
        while node >= 0:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tuple(reversed(tokens))

    def draft(self) -> DraftTree:
        """The best `budget` nodes, best first: a prefix of them is the best smaller draft."""
        kept = [node for node in self._ranked(self.budget) if self._values[node] > -math.inf]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return DraftTree(tuple(self.tokens[node] for node in kept), tuple(place[self.parents[node]] for node in kept))

    def _ranked(self, count: int) -> list[int]:
        """The best nodes. Equal values come in the order of creation, so that a parent precedes its children."""
        return heapq.nsmallest(count, range(len(self.tokens)), key=lambda node: (-self._values[node], node))
