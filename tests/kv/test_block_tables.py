import random

import pytest

from paceline.core.sequence import BLOCK_SIZE
from paceline.kv import block_tables
from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.kv.prefix import chain_keys

IDS = [random.Random(2).randrange(50_000) for _ in range(10 * BLOCK_SIZE)]


def computed(tables: BlockTables, sequence_id: int, ids: list[int], salt: str = "") -> int:
    """Open, compute and publish all of `ids`; returns the prefix hit."""
    hit = tables.open(sequence_id, ids, salt)
    assert tables.grow(sequence_id, len(ids))
    tables.publish(sequence_id, ids, len(ids))
    return hit


def test_blocks_for() -> None:
    assert [blocks_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_second_sequence_shares_the_first_ones_full_blocks() -> None:
    tables = BlockTables(16)
    assert computed(tables, 1, IDS[:40]) == 0
    assert computed(tables, 2, IDS[:40]) == 32
    assert tables.blocks(2)[:2] == tables.blocks(1)[:2]
    assert tables.blocks(2)[2] != tables.blocks(1)[2]
    assert tables.pool.num_free == 16 - 4
    assert tables.capacity(2) == 48
    tables.pool.check()


@pytest.mark.parametrize(("length", "hit"), [(16, 0), (17, 16), (32, 16), (33, 32), (48, 32)])
def test_a_hit_leaves_the_last_token_to_compute(length: int, hit: int) -> None:
    tables = BlockTables(16)
    computed(tables, 1, IDS[:48])
    assert tables.open(2, IDS[:length], "") == hit


def test_salts_are_isolated() -> None:
    tables = BlockTables(16)
    computed(tables, 1, IDS[:48], "alice")
    assert tables.find(IDS[:48], "bob") == ([], [])
    assert tables.find(IDS[:48], "") == ([], [])
    assert len(tables.find(IDS[:48], "alice")[0]) == 2
    assert computed(tables, 2, IDS[:48], "bob") == 0
    assert not set(tables.blocks(1)) & set(tables.blocks(2))


def test_only_full_computed_blocks_are_published() -> None:
    tables = BlockTables(8)
    tables.open(1, IDS[:40], "")
    tables.grow(1, 48)
    for num_computed, published in ((15, 0), (16, 1), (31, 1), (40, 2)):
        tables.publish(1, IDS[:40], num_computed)
        assert tables.pool.num_cached == published
    assert len(tables.find(IDS[:48], "")[0]) == 2


def test_publishing_in_steps_gives_the_same_keys_as_at_once() -> None:
    steps, once = BlockTables(8), BlockTables(8)
    computed(once, 1, IDS[:64])
    steps.open(1, IDS[:16], "")
    steps.grow(1, 64)
    for end in range(16, 65, 3):
        steps.publish(1, IDS[:end], end)
    steps.publish(1, IDS[:64], 64)
    assert steps.find(IDS[:65], "")[1] == once.find(IDS[:65], "")[1]


def test_publishing_continues_after_a_hit() -> None:
    tables = BlockTables(16)
    computed(tables, 1, IDS[:40])
    computed(tables, 2, IDS[:70])
    assert len(tables.find(IDS[:70], "")[0]) == 4


def test_shrink_releases_later_blocks_and_keeps_published_ones() -> None:
    tables = BlockTables(8)
    computed(tables, 1, IDS[:32])
    tables.grow(1, 80)
    before = list(tables.blocks(1))
    tables.shrink(1, 33)
    assert tables.blocks(1) == before[:3]
    tables.shrink(1, 32)
    assert tables.blocks(1) == before[:2]
    tables.shrink(1, 5)
    assert tables.blocks(1) == before[:2]
    assert tables.pool.num_free == 6
    tables.pool.check()


def test_grow_is_all_or_nothing() -> None:
    tables = BlockTables(3)
    tables.open(1, IDS[:8], "")
    assert tables.grow(1, 20)
    assert not tables.grow(1, 49)
    assert len(tables.blocks(1)) == 2
    assert tables.pool.num_free == 1
    assert tables.grow(1, 5)
    assert len(tables.blocks(1)) == 2
    assert tables.grow(1, 48)
    tables.pool.check()


def test_closing_twice_is_not_an_error_and_frees_once() -> None:
    tables = BlockTables(4)
    computed(tables, 1, IDS[:40])
    assert 1 in tables
    tables.close(1)
    tables.close(1)
    tables.close(99)
    assert 1 not in tables
    assert len(tables) == 0
    assert tables.pool.num_free == 4
    tables.pool.check()


def test_a_shared_block_lives_until_the_last_holder_closes() -> None:
    tables = BlockTables(8)
    computed(tables, 1, IDS[:20])
    computed(tables, 2, IDS[:20])
    tables.close(1)
    shared = tables.blocks(2)[0]
    tables.open(3, [7] * 8, "")
    assert tables.grow(3, 6 * BLOCK_SIZE)
    assert shared not in tables.blocks(3)
    assert not tables.grow(3, 7 * BLOCK_SIZE)
    tables.pool.check()


def test_without_prefix_caching_nothing_is_shared() -> None:
    tables = BlockTables(16, prefix_caching=False)
    computed(tables, 1, IDS[:40])
    assert computed(tables, 2, IDS[:40]) == 0
    assert tables.pool.num_cached == 0
    assert not set(tables.blocks(1)) & set(tables.blocks(2))


@pytest.mark.parametrize("seed", range(10))
def test_a_hit_always_holds_the_same_tokens(seed: int) -> None:
    """Random sequences decode with speculative growth and rollback over a small pool; `memory` plays the cache."""
    rng = random.Random(seed)
    tables = BlockTables(rng.randint(8, 20))
    memory: dict[tuple[int, int], tuple[str, int]] = {}  # (block, offset) -> (salt, token) last written
    alive: dict[int, tuple[list[int], str, int]] = {}  # ids, salt, num_computed
    num_hits = 0

    def write(sequence_id: int, start: int, tokens: list[int], salt: str) -> None:
        for i, token in enumerate(tokens, start):
            memory[tables.blocks(sequence_id)[i // BLOCK_SIZE], i % BLOCK_SIZE] = (salt, token)

    for step in range(300):
        action = rng.random()
        if action < 0.25 or not alive:
            # few distinct prompts over a tiny alphabet: prefixes are shared, diverge, and come back
            ids = [rng.choice((0, 0, 0, 1)) if i % BLOCK_SIZE == 0 else i % 7 for i in range(rng.randint(2, 70))]
            salt = rng.choice(("", "s"))
            hit = tables.open(step, ids, salt)
            assert hit < len(ids)
            num_hits += hit > 0
            seen = [memory[tables.blocks(step)[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(hit)]
            assert seen == [(salt, token) for token in ids[:hit]]
            alive[step] = (ids, salt, hit)
        elif action < 0.8:
            chosen = rng.choice(list(alive))
            ids, salt, num_computed = alive[chosen]
            drafts = [rng.randrange(100, 200) for _ in range(rng.randint(0, 20))]
            if not tables.grow(chosen, len(ids) + len(drafts)):
                tables.close(chosen)
                del alive[chosen]
                continue
            write(chosen, num_computed, ids[num_computed:] + drafts, salt)
            accepted = rng.randint(0, len(drafts))
            num_computed = len(ids) + accepted
            ids += [*drafts[:accepted], rng.randrange(7)]
            tables.shrink(chosen, num_computed)
            tables.publish(chosen, ids, num_computed)
            assert len(tables.blocks(chosen)) == blocks_for(num_computed)
            alive[chosen] = (ids, salt, num_computed)
        else:
            chosen = rng.choice(list(alive))
            tables.close(chosen)
            del alive[chosen]
        tables.pool.check()
        for sequence_id, (ids, salt, num_computed) in alive.items():
            blocks = tables.blocks(sequence_id)
            cached = [memory[blocks[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(num_computed)]
            assert cached == [(salt, token) for token in ids[:num_computed]]
    for sequence_id in alive:
        tables.close(sequence_id)
    tables.pool.check()
    assert tables.pool.num_free == tables.pool.num_blocks
    assert num_hits > 5


def test_a_view_of_a_table_grows_and_a_rollback_makes_a_new_list() -> None:
    tables = BlockTables(8)
    tables.open(1, IDS[:1], "")
    tables.grow(1, 2 * BLOCK_SIZE)
    watched, before = tables.blocks(1), [*tables.blocks(1)]
    tables.grow(1, 3 * BLOCK_SIZE)
    tables.shrink(1, 3 * BLOCK_SIZE)
    assert tables.blocks(1) is watched
    assert watched[:2] == before
    tables.shrink(1, BLOCK_SIZE)
    assert tables.blocks(1) is not watched
    assert tables.blocks(1) == before[:1]
    tables.pool.check()


@pytest.mark.parametrize("num_tokens", [16, 20, 32, 37])
def test_fork_shares_full_blocks_and_copies_a_partly_filled_one(num_tokens: int) -> None:
    tables = BlockTables(16)
    tables.open(1, IDS[:16], "")
    assert tables.grow(1, 40)
    tables.publish(1, IDS, 16)
    slots = tables.fork(1, 2, num_tokens)
    assert slots is not None
    num_full, rest = divmod(num_tokens, BLOCK_SIZE)
    assert [len(part) for part in slots] == [rest, rest]
    assert tables.blocks(2)[:num_full] == tables.blocks(1)[:num_full]
    assert len(tables.blocks(2)) == blocks_for(num_tokens)
    assert not set(tables.blocks(2)[num_full:]) & set(tables.blocks(1))
    tables.close(1)
    tables.pool.check()
    tables.close(2)
    assert tables.pool.num_free == 16


def test_fork_without_a_free_block_changes_nothing() -> None:
    tables = BlockTables(2)
    tables.open(1, IDS[:20], "")
    assert tables.grow(1, 20)
    assert tables.fork(1, 2, 18) is None
    assert 2 not in tables
    assert tables.fork(1, 2, 16) == (range(0), range(0))
    tables.pool.check()


def test_the_keys_of_a_waiting_sequence_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()

    def counted(ids: list[int], salt: str) -> list[bytes]:
        lengths.append(len(ids))
        return chain_keys(ids, salt)

    monkeypatch.setattr(block_tables, "chain_keys", counted)
    tables = BlockTables(8)
    for ids in (IDS[:40], IDS[:40], IDS[:60]):  # it was preempted, and is longer now
        tables.find(ids, "", 1)
    assert computed(tables, 1, IDS[:60]) == 0
    assert lengths == [39, 59]
    for _ in range(2):
        assert len(tables.find(IDS[:60], "", 2)[0]) == 3
    assert lengths == [39, 59, 59], "another sequence has its own"
    tables.close(2)
    tables.find(IDS[:60], "", 2)
    assert lengths == [39, 59, 59, 59]
