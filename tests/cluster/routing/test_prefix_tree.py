import random

from paceline.cluster.routing.prefix_tree import KEY_MASK, NONE, PrefixTree, members


def chain(*steps: int) -> list[int]:
    """Keys of a chain of blocks; each key depends on all steps up to its block."""
    return [hash(steps[: i + 1]) & KEY_MASK for i in range(len(steps))]


def prefixes(tree: PrefixTree, steps: tuple[int, ...], root: int = 0) -> dict[int, int]:
    found = tree.match([key - root for key in chain(*steps)], root)
    return {number: blocks for blocks, holders in found for number in members(holders)}


def test_match_returns_the_prefix_of_each_holder() -> None:
    tree = PrefixTree()
    tree.add(1 << 0, NONE, chain(1, 2, 3, 4))
    tree.add(1 << 1, NONE, chain(1, 2))
    tree.add(1 << 70, NONE, chain(1, 2, 9))
    assert prefixes(tree, (1, 2, 3, 4, 5)) == {0: 4, 1: 2, 70: 2}
    assert prefixes(tree, (1, 2, 9)) == {0: 2, 1: 2, 70: 3}
    assert prefixes(tree, (2, 3)) == {}
    assert tree.match([], 0) == []


def test_the_root_shifts_every_key() -> None:
    tree = PrefixTree()
    tree.add(1, NONE, chain(1, 2))
    assert prefixes(tree, (1, 2), root=12345) == {0: 2}
    assert tree.match(chain(1, 2), 12345) == []


def test_orphaned_block_matches_again_after_its_parent_returns() -> None:
    tree = PrefixTree()
    nodes = tree.add(1, NONE, chain(1, 2, 3, 4))
    tree.drop(1, nodes[1])
    assert prefixes(tree, (1, 2, 3, 4)) == {0: 1}
    tree.drop(1, nodes[3])
    tree.add(1, nodes[0], chain(1, 2)[1:])
    assert prefixes(tree, (1, 2, 3, 4)) == {0: 3}


def test_nodes_without_holders_are_removed() -> None:
    tree = PrefixTree()
    own = tree.add(1, NONE, chain(1, 2, 3))
    other = tree.add(2, NONE, chain(1, 2))
    for node in own:  # from the head: the rest is orphaned, not removed
        tree.drop(1, node)
    assert len(tree) == 2
    for node in reversed(other):
        tree.drop(2, node)
    assert len(tree) == 0
    assert tree.add(1, NONE, chain(7, 8))[0] in own  # node numbers are reused
    assert prefixes(tree, (7, 8)) == {0: 2}


def test_against_sets_of_chains() -> None:
    """Reference: a holder has a prefix iff it has every block of it."""
    generator = random.Random(5)
    tree = PrefixTree()
    has: dict[tuple[int, tuple[int, ...]], int] = {}
    for _ in range(3000):
        holder = generator.randrange(6)
        steps = tuple(generator.randrange(2) for _ in range(generator.randint(1, 6)))
        if generator.random() < 0.5:
            for i in range(len(steps)):
                parent = has.get((holder, steps[:i]), NONE)
                if i and parent == NONE:
                    break
                if (holder, steps[: i + 1]) not in has:
                    [has[holder, steps[: i + 1]]] = tree.add(1 << holder, parent, chain(*steps)[i : i + 1])
        elif (holder, steps) in has:
            tree.drop(1 << holder, has.pop((holder, steps)))
        query = tuple(generator.randrange(2) for _ in range(7))
        expected = {}
        for number in range(6):
            length = next((i for i in range(7) if (number, query[: i + 1]) not in has), 7)
            if length:
                expected[number] = length
        assert prefixes(tree, query) == expected
    for (holder, _), node in has.items():
        tree.drop(1 << holder, node)
    assert len(tree) == 0


def test_members_are_the_set_bits() -> None:
    assert members(0) == ()
    assert members(0b1011) == (0, 1, 3)
    assert members(1 << 1000 | 1) == (0, 1000)
