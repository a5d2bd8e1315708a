"""Host memory and disk together, also if one of them is full or fails."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.clock import WallClock
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from paceline.kv.tiers.block import HEADER_BYTES, TieredBlock
from paceline.kv.tiers.store import TierStore
from paceline.kv.tiers.tiers import DiskFolder, Fetch, HostTier
from tests.kv.tiers.chains import chain

SIZE = 1000


class Memory:
    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.block_bytes = num_slots, SIZE
        self._data = [bytearray(SIZE) for _ in range(num_slots)]

    def view(self, slot: int) -> memoryview:
        return memoryview(self._data[slot])

    def wait(self, slot: int) -> None:
        pass


def contents(block: TieredBlock) -> bytes:
    return (block.key * 40)[:SIZE]


def put(store: TierStore, blocks: Sequence[TieredBlock]) -> None:
    pairs = store.reserve(blocks)
    for block, slot in pairs:
        store.memory.view(slot)[:] = contents(block)
    store.stored(pairs)


def settle(store: TierStore) -> None:
    for _ in range(600):
        if not store.num_unwritten and not store._jobs:
            return
        store.wait(0.05)
    raise AssertionError("the store's thread does not come to an end")


def fetched(store: TierStore, blocks: Sequence[TieredBlock]) -> Fetch:
    fetch = Fetch([block.key for block in blocks])
    store.begin(fetch)
    for _ in range(600):
        if fetch.is_done:
            return fetch
        store.wait(0.05)
    raise AssertionError("the fetch does not come to an end")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TierStore]:
    """Room for 4 blocks in memory and 8 on disk."""
    made = TierStore(Memory(4), WallClock(), DiskFolder(tmp_path, bytes(32), SIZE), 8 * (SIZE + HEADER_BYTES))
    yield made
    made.close(10.0)


def test_blocks_evicted_from_memory_are_read_from_disk(store: TierStore) -> None:
    first, second = chain(4, first=1), chain(4, first=2)
    put(store, first)
    settle(store)
    put(store, second)
    assert store.run([block.key for block in first]) == ["disk"] * 4
    assert store.run([block.key for block in second]) == ["host"] * 4
    settle(store)
    fetch = fetched(store, first)
    assert fetch.leased == [block.key for block in first]
    assert fetch.from_disk == {block.key for block in first}
    slots = store.lease([block.key for block in first])
    assert [bytes(store.memory.view(slot)) for slot in slots] == [contents(block) for block in first]
    store.release([block.key for block in first])
    store.finish(fetch)


def test_leased_slots_are_not_reused(store: TierStore) -> None:
    kept, others = chain(4, first=1), chain(4, first=2)
    put(store, kept)
    settle(store)
    slots = store.lease([block.key for block in kept])
    put(store, others)
    assert store.traffic.dropped == 4
    assert [bytes(store.memory.view(slot)) for slot in slots] == [contents(block) for block in kept]
    store.release([block.key for block in kept])
    put(store, others)
    assert store.run([block.key for block in others]) == ["host"] * 4


def test_a_fetch_uses_the_free_memory_and_ends(store: TierStore) -> None:
    long = chain(6, first=1)
    for block in long:
        put(store, [block])
        settle(store)
    fetch = fetched(store, long)
    assert fetch.leased == [block.key for block in long[:4]]
    store.finish(fetch)


def test_a_chain_longer_than_memory_is_written_to_disk_completely(tmp_path: Path) -> None:
    store = TierStore(Memory(4), WallClock(), DiskFolder(tmp_path, bytes(32), SIZE), 1 << 20)
    long = chain(20)
    for start in range(0, 20, 2):
        put(store, long[start : start + 2])
        settle(store)
    assert store.num_blocks == (4, 20)
    assert store.traffic.dropped == 0
    assert store.run([block.key for block in long]) == ["disk"] * 16 + ["host"] * 4
    store.close(10.0)


def test_the_disk_keeps_to_its_limit_leaf_first(store: TierStore, tmp_path: Path) -> None:
    long, other = chain(6, first=1), chain(4, first=2)
    for block in (*long, *other):
        put(store, [block])
        settle(store)
    assert store.num_blocks[1] == 8
    assert len(list(tmp_path.glob("*/*.kv"))) == 8
    assert len(store.run([block.key for block in long])) == 4


def test_a_failing_disk_loses_only_blocks(store: TierStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskFolder, "write", full)
    blocks = chain(3)
    put(store, blocks)
    settle(store)
    assert store.run([block.key for block in blocks]) == ["host"] * 3
    assert (store.num_blocks[1], store.traffic.dropped) == (0, 3)
    monkeypatch.undo()
    store._trouble_until = 0.0
    put(store, chain(1, first=7))
    settle(store)
    assert store.num_blocks[1] == 1


def test_events_report_both_tiers_and_evictions(store: TierStore) -> None:
    events: list[CacheEvent] = []
    store.listen(events.append)
    first, second = chain(4, first=1), chain(8, first=2)
    for block in (*first, *second):
        put(store, [block])
        settle(store)
    here: dict[str, set[object]] = {"host": set(), "disk": set()}
    for event in events:
        assert isinstance(event, BlocksStored | BlocksRemoved)
        keys = set(event.keys)
        assert keys.isdisjoint(here[event.tier]) if isinstance(event, BlocksStored) else keys <= here[event.tier]
        here[event.tier] ^= keys
    assert here["host"] == {block.key for block in store._host.blocks}
    assert here["disk"] == {block.key for block in store._disk}


class StuckFolder(DiskFolder):
    """The first write waits for `gate`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate, self.writing = threading.Event(), threading.Event()

    def write(self, block: TieredBlock, contents: memoryview) -> bool:
        self.writing.set()
        assert self.gate.wait(30)
        return super().write(block, contents)


def test_closing_writes_the_remaining_blocks(tmp_path: Path) -> None:
    store = TierStore(Memory(8), WallClock(), DiskFolder(tmp_path, bytes(32), SIZE), 1 << 20)
    put(store, chain(8))
    store.close(10.0)
    store.close(10.0)
    assert store.num_blocks == (8, 8)
    assert len(list(tmp_path.glob("*/*.kv"))) == 8


def test_closing_respects_its_time_limit(tmp_path: Path) -> None:
    folder = StuckFolder(tmp_path, bytes(32), SIZE)
    store = TierStore(Memory(8), WallClock(), folder, 1 << 20)
    put(store, chain(8))
    assert folder.writing.wait(30)
    store._closing = 0.0  # the time is up, as far as the thread can see
    folder.gate.set()
    store.close(10.0)
    assert store.num_blocks == (8, 1)


def test_a_folder_over_its_limit_is_trimmed_at_start(tmp_path: Path) -> None:
    store = TierStore(Memory(8), WallClock(), DiskFolder(tmp_path, bytes(32), SIZE), 1 << 20)
    put(store, chain(8))
    store.close(10.0)
    small = TierStore(Memory(8), WallClock(), DiskFolder(tmp_path, bytes(32), SIZE), 3 * (SIZE + HEADER_BYTES))
    assert small.num_blocks[1] == len(list(tmp_path.glob("*/*.kv"))) == 3
    small.close(0.0)


def test_an_unfilled_slot_becomes_empty() -> None:
    tier, (block,) = HostTier(1), chain(1)
    slot, _ = tier.take()
    assert slot is not None
    assert tier.take() == (None, None)
    tier.give_back(slot)
    assert tier.take() == (slot, None)
    assert tier.add(block, slot)
    assert tier.take() == (slot, block.key)
