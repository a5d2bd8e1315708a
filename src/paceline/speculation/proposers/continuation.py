"""What is likely to follow, read off a suffix automaton: a tree that holds the most probable continuations.

A context of L tokens that was followed c times by a token, and n times by any, gives it

    P = c / (n + ESCAPE / L)

and what is left to the next shorter context that occurred: long and frequent contexts are trusted, short and rare ones
share with others. The chance of a node is the product along its path.
"""

from heapq import heappop, heappush, nlargest

from paceline.speculation.proposers.suffix_automaton import SuffixAutomaton
from paceline.speculation.trees.guess import Guess

ESCAPE = 2.0
FLOOR = 0.1
"""A node less likely than this is not worth a row of the target's pass."""
MAX_CHILDREN = 4
MAX_FOLLOWERS = 64
"""A context that so many different tokens followed says nothing about the next."""


def grow(automaton: SuffixAutomaton, context: tuple[int, int], budget: int) -> Guess:
    """The `budget` most likely nodes after `context` (state, length), likeliest first; fewer where chances are under
    the floor."""
    tokens: list[int] = []
    parents: list[int] = []
    expected = 0.0
    leaves: list[tuple[float, int, int, int, int, int]] = []  # (-chance, order, token, state, length, parent)

    def branch(state: int, length: int, chance: float, parent: int) -> None:
        taken: set[int] = set()
        for size, followers in automaton.contexts(state, length):
            if len(followers) > MAX_FOLLOWERS:
                return
            fresh = [(automaton.count(after), token, after) for token, after in followers.items() if token not in taken]
            share = chance / (sum(count for count, _, _ in fresh) + ESCAPE / size)
            for count, token, after in nlargest(MAX_CHILDREN, fresh):
                taken.add(token)
                if count * share >= FLOOR:
                    heappush(leaves, (-count * share, len(leaves), token, after, size + 1, parent))
            chance = share * ESCAPE / size
            if chance < FLOOR:
                return

    branch(*context, 1.0, -1)
    while leaves and len(tokens) < budget:
        chance, _, token, state, length, parent = heappop(leaves)
        tokens.append(token)
        parents.append(parent)
        expected -= chance
        branch(state, length, -chance, len(tokens) - 1)
    return Guess(tuple(tokens), tuple(parents), expected)
