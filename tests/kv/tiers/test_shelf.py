"""Which block leaves a tier next."""

import random

import pytest

from paceline.kv.tiers.block import TieredBlock, parents_first
from paceline.kv.tiers.shelf import Shelf
from tests.kv.tiers.chains import chain


def shelf_of(*blocks: TieredBlock) -> Shelf:
    shelf = Shelf()
    for block in blocks:
        shelf.add(block)
    return shelf


def leave_all(shelf: Shelf) -> list[bytes]:
    left = []
    while (key := shelf.oldest()) is not None:
        shelf.remove(key)
        left.append(key)
    return left


@pytest.mark.parametrize("order", ["head first", "tail first"])
def test_a_chain_leaves_from_its_tail_however_it_came(order: str) -> None:
    blocks = chain(4)
    shelf = shelf_of(*(blocks if order == "head first" else reversed(blocks)))
    assert leave_all(shelf) == [block.key for block in reversed(blocks)]


def test_the_chain_not_used_for_longest_goes_first_and_whole() -> None:
    old, new = chain(3, first=100), chain(3, first=200)
    shelf = shelf_of(*old, *new)
    for block in reversed(old):
        shelf.use(block.key)
    assert leave_all(shelf) == [block.key for block in (*reversed(new), *reversed(old))]


def test_a_head_that_others_use_outlives_the_tail_that_nobody_does() -> None:
    long, other = chain(3, first=100), chain(1, first=200)
    shelf = shelf_of(*long, *other)
    shelf.use(long[0].key)
    left = leave_all(shelf)
    assert left == [long[2].key, long[1].key, other[0].key, long[0].key]


def test_what_is_leased_stays() -> None:
    blocks = chain(2)
    shelf = shelf_of(*blocks)
    shelf.lease(blocks[1].key)
    assert shelf.oldest() is None
    shelf.release(blocks[1].key)
    assert shelf.oldest() == blocks[1].key


def test_what_is_spared_leaves_last() -> None:
    old, new = chain(1, first=1), chain(1, first=2)
    shelf = shelf_of(*old, *new)
    assert shelf.oldest({old[0].key}) == new[0].key
    assert shelf.oldest({old[0].key, new[0].key}) == old[0].key


def test_a_parent_that_returns_has_its_children_again() -> None:
    blocks = chain(3)
    shelf = shelf_of(*blocks)
    shelf.remove(blocks[1].key)  # as a corrupt one would be
    assert shelf.oldest() == blocks[0].key
    shelf.add(blocks[1])
    assert leave_all(shelf) == [block.key for block in reversed(blocks)]


def test_the_books_balance_whatever_comes_and_goes() -> None:
    draw = random.Random(5)
    known = [*chain(6, first=1), *chain(6, first=2), *chain(6, salt="x")]
    shelf = Shelf()
    for _ in range(3000):
        block = draw.choice(known)
        if block.key not in shelf:
            shelf.add(block)
        elif draw.random() < 0.5:
            shelf.remove(block.key)
        else:
            shelf.use(block.key)
        here = {one.key for one in shelf}
        leaves = {key for key in here if not any(one.parent == key for one in shelf)}
        assert set(shelf._leaves) == leaves
    leave_all(shelf)
    assert len(shelf) == 0
    assert shelf._children == {}


def test_parents_come_first_and_orphans_not_at_all() -> None:
    whole, broken = chain(4, first=1), chain(4, first=2)
    blocks = [*reversed(whole), broken[0], broken[2], broken[3]]
    told = [block.key for block in parents_first(blocks)]
    assert set(told) == {block.key for block in (*whole, broken[0])}
    assert [key for key in told if key in {b.key for b in whole}] == [block.key for block in whole]
