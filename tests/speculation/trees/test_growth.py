"""The choice of the best nodes of a tree."""

from math import log

from paceline.speculation.drafts.drafts import DraftTree
from paceline.speculation.trees.growth import Growth


def grown(budget):
    """Root: a 0.6, b 0.31. Under a: c 0.5, d 0.4. Under b: e 0.9."""
    tree = Growth(budget)
    tree.add(-1, [(10, log(0.6)), (11, log(0.31))])
    tree.add(0, [(12, log(0.5)), (13, log(0.4))])
    tree.add(1, [(14, log(0.9))])
    return tree


def test_the_most_probable_nodes_are_drafted_best_first():
    # a 0.6, b 0.31, c 0.3, e 0.279, d 0.24
    assert grown(9).draft() == DraftTree((10, 11, 12, 14, 13), (-1, -1, 0, 1, 0))
    assert grown(3).draft() == DraftTree((10, 11, 12), (-1, -1, 0))
    assert grown(1).draft() == DraftTree((10,), (-1,))


def test_the_frontier_has_only_nodes_whose_children_may_be_drafted():
    assert grown(9).frontier(1, 8) == [0, 1]
    assert grown(9).frontier(2, 8) == [2, 4, 3]
    assert grown(9).frontier(2, 2) == [2, 4]
    # Of two drafted nodes a is one: the other may be a child of a, but not of b
    assert grown(2).frontier(1, 8) == [0]
    assert grown(1).frontier(1, 8) == []


def test_the_frontier_ends_at_max_levels():
    tree = Growth(9, max_levels=2)
    tree.add(-1, [(10, log(0.6)), (11, log(0.3))])
    assert tree.frontier(1, 8) == [0, 1]
    tree.add(0, [(12, log(0.5))])
    assert tree.frontier(2, 8) == []


def test_paths():
    tree = grown(9)
    assert tree.path(-1) == ()
    assert tree.path(3) == (10, 13)


def test_a_child_never_precedes_its_parent():
    tree = Growth(4)
    tree.add(-1, [(1, 0.0)])
    tree.add(0, [(2, 1e-7)])  # rounding may leave a confidence above 1
    assert tree.draft() == DraftTree((1, 2), (-1, 0))
