import random

import pytest

from paceline.policy.routing.prefix_tree import KEY_MASK, NONE, PrefixTree, members


def chain(*steps: int) -> list[int]:
    """Keys of a chain of blocks; each key depends on all steps up to its block."""
    return [hash(steps[: i + 1]) & KEY_MASK for i in range(len(steps))]


def prefixes(tree: PrefixTree, steps: tuple[int, ...]) -> dict[int, int]:
    found = tree.match(chain(*steps))
    return {number: blocks for blocks, holders in found for number in members(holders)}


def test_match_returns_the_prefix_of_each_holder() -> None:
    tree = PrefixTree()
    tree.add(1 << 0, NONE, chain(1, 2, 3, 4))
    tree.add(1 << 1, NONE, chain(1, 2))
    tree.add(1 << 70, NONE, chain(1, 2, 9))
    assert prefixes(tree, (1, 2, 3, 4, 5)) == {0: 4, 1: 2, 70: 2}
    assert prefixes(tree, (1, 2, 9)) == {0: 2, 1: 2, 70: 3}
    assert prefixes(tree, (2, 3)) == {}
    assert tree.match([]) == []


def test_orphaned_block_matches_again_after_its_parent_returns() -> None:
    tree, keys = PrefixTree(), chain(1, 2, 3, 4)
    tree.add(1, NONE, keys)
    tree.drop(1, keys[1:2])
    assert prefixes(tree, (1, 2, 3, 4)) == {0: 1}
    tree.drop(1, keys[3:])
    tree.add(1, keys[0], keys[1:2])
    assert prefixes(tree, (1, 2, 3, 4)) == {0: 3}


def test_blocks_without_holders_are_removed() -> None:
    tree, keys = PrefixTree(), chain(1, 2, 3)
    tree.add(1, NONE, keys)
    tree.add(2, NONE, keys[:2])
    tree.drop(1, keys)  # from the head: the rest is orphaned, not removed
    assert len(tree) == 2
    tree.drop(2, keys[1::-1])
    assert len(tree) == 0
    tree.add(1, NONE, chain(7, 8))
    assert prefixes(tree, (7, 8)) == {0: 2}


def test_depths_and_parents_are_those_of_the_chain() -> None:
    tree, keys = PrefixTree(), chain(1, 2, 3, 4)
    tree.add(1, NONE, keys)
    tree.add(2, NONE, keys[:2])
    assert [tree.depth(key) for key in keys] == [1, 2, 3, 4]
    assert [tree.parent(key) for key in keys] == [NONE, *keys[:3]]
    assert tree.has_none(2, keys[2:])
    assert not tree.has_none(2, keys)


@pytest.mark.parametrize("seed", range(4))
def test_against_sets_of_chains(seed: int) -> None:
    """Reference: a holder has a prefix iff it has every block of it."""
    generator = random.Random(seed)
    tree = PrefixTree()
    has: set[tuple[int, tuple[int, ...]]] = set()
    for _ in range(2000):
        holder = generator.randrange(6)
        steps = tuple(generator.randrange(2) for _ in range(generator.randint(1, 8)))
        keys = chain(*steps)
        own = [i for i in range(len(steps)) if (holder, steps[: i + 1]) in has]
        if generator.random() < 0.5:
            # All blocks after one that the holder has, as many as it lacks
            start = generator.choice([0, *[i + 1 for i in own]])
            end = next((i for i in own if i >= start), len(steps))
            tree.add(1 << holder, keys[start - 1] if start else NONE, keys[start:end])
            has |= {(holder, steps[: i + 1]) for i in range(start, end)}
        elif own:
            dropped = own[::-1] if generator.random() < 0.5 else generator.sample(own, generator.randint(1, len(own)))
            tree.drop(1 << holder, [keys[i] for i in dropped])
            has -= {(holder, steps[: i + 1]) for i in dropped}
        query = tuple(generator.randrange(2) for _ in range(9))
        expected = {}
        for number in range(6):
            length = next((i for i in range(9) if (number, query[: i + 1]) not in has), 9)
            if length:
                expected[number] = length
        assert prefixes(tree, query) == expected
        blocks = {path[: i + 1] for _, path in has for i in range(len(path))}
        assert len(tree) == len(blocks)
    for holder, steps in has:
        tree.drop(1 << holder, chain(*steps)[-1:])
    assert len(tree) == 0


def test_members_are_the_set_bits() -> None:
    assert members(0) == ()
    assert members(0b1011) == (0, 1, 3)
    assert members(1 << 1000 | 1) == (0, 1000)
