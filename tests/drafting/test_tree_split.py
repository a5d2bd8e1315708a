"""The nodes of a draft between its chain and alternatives to it."""

import random

from paceline.drafting.branches import BranchKey
from paceline.drafting.drafts import PROBE_EVERY, TreeSplit
from paceline.speculation.drafts.drafts import DraftTree


def learned(alpha: float, hit: float, rounds: int = 400) -> TreeSplit:
    """After rounds whose tokens are accepted with probability `alpha`; another token is the first alternative with `hit`."""
    rng, split = random.Random(1), TreeSplit()
    for _ in range(rounds):
        depth, num_alternatives = split.split(8, 8)
        chain = list(range(100, 100 + depth))
        alternatives = [BranchKey(i % depth, 200 + i) for i in range(num_alternatives)]
        accepted = 0
        while accepted < depth and rng.random() < alpha:
            accepted += 1
        at_end = [key.token for key in alternatives if key.accepted == accepted]
        token = at_end[0] if at_end and rng.random() < hit else 999
        split.observe(chain, alternatives, [*chain[:accepted], token, *([998] if token != 999 else [])])
    return split


def test_sure_drafts_are_chains_and_unsure_ones_are_wide() -> None:
    sure, unsure = learned(0.97, 0.1), learned(0.3, 0.9)
    depth, num_alternatives = sure.split(8, 8)
    assert (depth + num_alternatives, depth >= 6) == (8, True)
    depth, num_alternatives = unsure.split(8, 8)
    assert (depth + num_alternatives, depth <= 4) == (8, True)


def test_one_node_is_the_first_token() -> None:
    split = TreeSplit()
    assert [split.split(1, 8) for _ in range(2 * PROBE_EVERY)] == [(1, 0)] * 2 * PROBE_EVERY
    assert split.split(0, 0) == (0, 0)


def test_chain_is_not_longer_than_allowed() -> None:
    depth, num_alternatives = learned(0.97, 0.1).split(8, 3)
    assert (depth, num_alternatives) == (3, 5)


def test_chains_probe_an_alternative_now_and_then() -> None:
    split = learned(0.999, 0.0)
    found = [split.split(4, 4) for _ in range(4 * PROBE_EVERY)]
    assert set(found) == {(4, 0), (3, 1)}
    assert found.count((3, 1)) == 4


def test_tree_has_the_best_nodes_first_and_parents_before_children() -> None:
    alternatives = [BranchKey(0, 50), BranchKey(2, 60), BranchKey(1, 70)]
    for split in (TreeSplit(), learned(0.9, 0.2), learned(0.2, 0.9)):
        tree = split.tree([1, 2, 3], alternatives)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        paths = {}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            paths[node] = (*paths.get(parent, ()), token)
        assert sorted(paths.values()) == [(1,), (1, 2), (1, 2, 3), (1, 2, 60), (1, 70), (50,)]
    assert TreeSplit().tree([1, 2], []) == DraftTree((1, 2), (-1, 0))
