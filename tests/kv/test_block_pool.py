import random

import pytest

from paceline.kv.block_tables import BlockPool


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def filled(pool: BlockPool, *names: str) -> list[int]:
    """A released chain, one published block a name."""
    blocks = []
    for key in keys(*names):
        block = pool.allocate()
        assert block is not None
        pool.publish(block, key)
        blocks.append(block)
    pool.release(blocks)
    return blocks


def test_hands_out_every_block_once_then_none() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(block for block in blocks if block is not None) == [0, 1, 2, 3]
    assert pool.allocate() is None
    assert pool.num_free == 0
    pool.check()


def test_a_released_block_still_serves_hits_until_it_is_taken_over() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, "a", "b")
    assert pool.find(keys("a", "b")) == blocks
    assert (pool.num_free, pool.num_cached) == (2, 2)
    pool.allocate()
    assert pool.find(keys("a", "b")) == blocks[:1]
    pool.allocate()
    assert pool.find(keys("a")) == []
    assert pool.num_cached == 0
    pool.check()


def test_eviction_goes_leaf_first_and_oldest_chain_first() -> None:
    pool = BlockPool(6)
    old, new = filled(pool, "a", "ab", "abc"), filled(pool, "x", "xy", "xyz")
    assert [pool.allocate() for _ in range(6)] == [*reversed(old), *reversed(new)]


def test_a_hit_marks_a_chain_as_recently_used() -> None:
    pool = BlockPool(4)
    old, new = filled(pool, "a", "ab"), filled(pool, "x", "xy")
    hit = pool.find(keys("a", "ab"))
    pool.hold(hit)
    pool.release(hit)
    assert [pool.allocate() for _ in range(4)] == [*reversed(new), *reversed(old)]


def test_a_shared_head_outlives_every_tail() -> None:
    pool = BlockPool(3)
    head, tail = pool.allocate(), pool.allocate()
    assert head is not None
    assert tail is not None
    pool.publish(head, b"h")
    pool.publish(tail, b"ht")
    pool.hold([head])
    other = pool.allocate()
    assert other is not None
    pool.publish(other, b"hu")
    pool.release([head, tail])
    assert pool.num_free == 1
    pool.release([head, other])
    assert [pool.allocate() for _ in range(3)] == [tail, other, head]


def test_blocks_without_a_key_are_reused_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached = filled(pool, "a", "ab")
    plain = pool.allocate()
    assert plain is not None
    pool.release([plain])
    assert pool.allocate() == plain
    assert pool.find(keys("a", "ab")) == cached


def test_held_blocks_are_never_taken_over() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, "a")
    assert pool.num_unheld(blocks) == 1
    pool.hold(blocks)
    assert pool.num_unheld(blocks) == 0
    assert pool.allocate() not in (None, *blocks)
    assert pool.allocate() is None
    assert pool.find(keys("a")) == blocks


def test_find_stops_at_the_first_gap() -> None:
    pool = BlockPool(3)
    blocks = filled(pool, "a", "b", "c")
    assert pool.find(keys("a", "missing", "c")) == blocks[:1]
    assert pool.find(keys("missing", "b")) == []


def test_the_first_block_of_a_key_wins() -> None:
    pool = BlockPool(2)
    one, other = pool.allocate(), pool.allocate()
    assert one is not None
    assert other is not None
    pool.publish(one, b"k")
    pool.publish(other, b"k")
    pool.publish(one, b"l")
    assert pool.find([b"k"]) == [one]
    assert pool.find([b"l"]) == []
    pool.check()


def test_check_notices_a_block_released_twice() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    assert block is not None
    pool.release([block])
    pool.release([block])
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


@pytest.mark.parametrize("seed", range(8))
def test_references_and_free_list_agree_under_random_use(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(1, 12))
    held: list[list[int]] = []  # chains, one reference a block each
    for step in range(400):
        action = rng.random()
        if action < 0.4:
            block = pool.allocate()
            assert (block is None) == (len({b for chain in held for b in chain}) == pool.num_blocks)
            if block is not None:
                held.append([block])
                if rng.random() < 0.7:
                    pool.publish(block, b"%d" % rng.randrange(20))
        elif action < 0.6:
            hit = pool.find([b"%d" % rng.randrange(20)])
            unheld = pool.num_unheld(hit)
            before = pool.num_free
            pool.hold(hit)
            assert before - pool.num_free == unheld
            held.append(hit)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
        assert pool.num_free == pool.num_blocks - len({b for chain in held for b in chain}), step
