from math import log

from paceline.speculation.trees.growth import Growth, tree_batch


def grown(budget):
    """Root: a 0.6, b 0.31. Under a: c 0.5, d 0.4. Under b: e 0.9."""
    tree = Growth(budget)
    tree.add(-1, [(10, log(0.6)), (11, log(0.31))])
    tree.add(0, [(12, log(0.5)), (13, log(0.4))])
    tree.add(1, [(14, log(0.9))])
    return tree


def test_the_likeliest_paths_are_kept_best_first():
    # a 0.6, b 0.31, c 0.3, e 0.279, d 0.24
    assert grown(9).draft() == ([10, 11, 12, 14, 13], [-1, -1, 0, 1, 0])
    assert grown(3).draft() == ([10, 11, 12], [-1, -1, 0])
    assert grown(1).draft() == ([10], [-1])


def test_only_nodes_whose_children_may_matter_are_grown():
    assert grown(9).frontier(1, 8) == [0, 1]
    assert grown(9).frontier(2, 8) == [2, 4, 3]
    assert grown(9).frontier(2, 2) == [2, 4]
    # Two nodes are kept and a is one of them: a child of a may be the other, of b none
    assert grown(2).frontier(1, 8) == [0]
    assert grown(1).frontier(1, 8) == []


def test_levels_that_nobody_can_use_are_not_grown():
    tree = Growth(9, max_levels=2)
    tree.add(-1, [(10, log(0.6)), (11, log(0.3))])
    assert tree.frontier(1, 8) == [0, 1]
    tree.add(0, [(12, log(0.5))])
    assert tree.frontier(2, 8) == []


def test_paths():
    tree = grown(9)
    assert tree.path(-1) == ()
    assert tree.path(3) == (10, 13)


def test_a_certain_child_does_not_overtake_its_parent():
    tree = Growth(4)
    tree.add(-1, [(1, 0.0)])
    tree.add(0, [(2, 1e-7)])  # rounding may leave a confidence above 1
    assert tree.draft() == ([1, 2], [-1, 0])


def test_batches_leave_out_empty_trees():
    batch = tree_batch([(7, grown(2)), (8, Growth(3)), (9, grown(1))])
    drafts = batch.split()
    assert list(drafts) == [7, 9]
    assert drafts[7].tokens == (10, 11)
    assert drafts[9].parents == (-1,)
    assert batch.probs is None
