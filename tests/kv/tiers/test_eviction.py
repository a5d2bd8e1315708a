"""The order of eviction."""

import random

import pytest

from paceline.kv.tiers.block import TieredBlock, parents_first
from paceline.kv.tiers.tiers import EvictionIndex
from tests.kv.tiers.chains import chain


def index_of(*blocks: TieredBlock) -> EvictionIndex:
    index = EvictionIndex()
    for block in blocks:
        index.add(block)
    return index


def evict_all(index: EvictionIndex) -> list[bytes]:
    left = []
    while (key := index.oldest()) is not None:
        index.remove(key)
        left.append(key)
    return left


@pytest.mark.parametrize("order", ["head first", "tail first"])
def test_a_chain_is_evicted_from_its_tail(order: str) -> None:
    blocks = chain(4)
    index = index_of(*(blocks if order == "head first" else reversed(blocks)))
    assert evict_all(index) == [block.key for block in reversed(blocks)]


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    old, new = chain(3, first=100), chain(3, first=200)
    index = index_of(*old, *new)
    for block in reversed(old):
        index.use(block.key)
    assert evict_all(index) == [block.key for block in (*reversed(new), *reversed(old))]


def test_a_shared_head_outlives_an_unused_tail() -> None:
    long, other = chain(3, first=100), chain(1, first=200)
    index = index_of(*long, *other)
    index.use(long[0].key)
    left = evict_all(index)
    assert left == [long[2].key, long[1].key, other[0].key, long[0].key]


def test_leased_blocks_stay() -> None:
    blocks = chain(2)
    index = index_of(*blocks)
    index.lease(blocks[1].key)
    assert index.oldest() is None
    index.release(blocks[1].key)
    assert index.oldest() == blocks[1].key


def test_spared_blocks_are_evicted_last() -> None:
    old, new = chain(1, first=1), chain(1, first=2)
    index = index_of(*old, *new)
    assert index.oldest({old[0].key}) == new[0].key
    assert index.oldest({old[0].key, new[0].key}) == old[0].key


def test_a_parent_added_again_has_its_children() -> None:
    blocks = chain(3)
    index = index_of(*blocks)
    index.remove(blocks[1].key)  # as a corrupt one would be
    assert index.oldest() == blocks[0].key
    index.add(blocks[1])
    assert evict_all(index) == [block.key for block in reversed(blocks)]


def test_the_index_is_consistent_under_random_use() -> None:
    draw = random.Random(5)
    known = [*chain(6, first=1), *chain(6, first=2), *chain(6, salt="x")]
    index = EvictionIndex()
    for _ in range(3000):
        block = draw.choice(known)
        if block.key not in index:
            index.add(block)
        elif draw.random() < 0.5:
            index.remove(block.key)
        else:
            index.use(block.key)
        here = {one.key for one in index}
        leaves = {key for key in here if not any(one.parent == key for one in index)}
        assert set(index._leaves) == leaves
    evict_all(index)
    assert len(index) == 0
    assert index._children == {}


def test_parents_come_first_and_orphans_are_left_out() -> None:
    whole, broken = chain(4, first=1), chain(4, first=2)
    blocks = [*reversed(whole), broken[0], broken[2], broken[3]]
    told = [block.key for block in parents_first(blocks)]
    assert set(told) == {block.key for block in (*whole, broken[0])}
    assert [key for key in told if key in {b.key for b in whole}] == [block.key for block in whole]
