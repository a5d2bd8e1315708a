"""Events that a cache reports."""

from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables
from paceline.kv.prefix import chain_keys

IDS = list(range(3 * BLOCK_SIZE + 5))


def listened(num_blocks: int = 8) -> tuple[BlockTables, list[CacheEvent]]:
    tables, events = BlockTables(num_blocks), []
    tables.pool.listen(events.append)
    return tables, events


def run(tables: BlockTables, sequence_id: int, ids: list[int], salt: str = "") -> None:
    tables.open(sequence_id, ids, salt)
    assert tables.grow(sequence_id, len(ids))
    tables.publish(sequence_id, ids, len(ids))


def test_full_blocks_are_reported_with_tokens_and_parents() -> None:
    tables, events = listened()
    run(tables, 1, IDS, "red")
    keys = chain_keys(IDS, "red")
    assert events == [
        BlocksStored((keys[i],), keys[i - 1] if i else None, tuple(IDS[i * 16 : (i + 1) * 16]), "red") for i in range(3)
    ]


def test_a_block_is_reported_when_all_its_tokens_are_computed() -> None:
    tables, events = listened()
    tables.open(1, IDS, "")
    tables.grow(1, len(IDS))
    tables.publish(1, IDS, BLOCK_SIZE - 1)
    assert events == []
    tables.publish(1, IDS, BLOCK_SIZE)
    assert len(events) == 1
    tables.publish(1, IDS, BLOCK_SIZE)
    assert len(events) == 1


def test_a_hit_reports_only_new_blocks() -> None:
    tables, events = listened(16)
    run(tables, 1, IDS)
    events.clear()
    run(tables, 2, IDS[:32] + [7] * 16)
    keys = chain_keys(IDS[:32] + [7] * 16, "")
    assert events == [BlocksStored((keys[2],), keys[1], (7,) * 16)]


def test_the_same_block_computed_twice_is_reported_once() -> None:
    tables, events = listened(16)
    tables.open(1, IDS, "")
    tables.open(2, IDS, "")
    for sequence_id in (1, 2):
        tables.grow(sequence_id, len(IDS))
        tables.publish(sequence_id, IDS, len(IDS))
    assert len(events) == 3


def test_evicted_blocks_are_reported_tail_first() -> None:
    tables, events = listened(4)
    run(tables, 1, IDS)
    tables.close(1)
    events.clear()
    keys = chain_keys(IDS, "")
    tables.open(2, [9] * 60, "")
    assert tables.grow(2, 3 * BLOCK_SIZE)
    assert events == [BlocksRemoved((keys[2],)), BlocksRemoved((keys[1],))]


def test_without_a_prefix_cache_nothing_is_reported() -> None:
    tables, events = BlockTables(8, prefix_caching=False), []
    tables.pool.listen(events.append)
    run(tables, 1, IDS)
    assert events == []
