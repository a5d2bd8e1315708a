"""Tiny engines whose cache has tiers below the device, and disk folders that can be blocked."""

import threading
from pathlib import Path
from typing import Any

from paceline.core.clock import Clock
from paceline.engine.engine import Engine
from paceline.engine.tiers import Tiers
from paceline.kv.block_tables import BlockTables
from paceline.kv.tiers.block import TieredBlock
from paceline.kv.tiers.store import TierStore
from paceline.kv.tiers.tiers import DiskFolder
from paceline.models.blocks.host_blocks import HostBlocks
from paceline.models.blocks.kv_blocks import cache_fingerprint
from paceline.models.runner.runner import ModelRunner
from tests.engine.harness import engine_of


class StoppedClock:
    """A clock that never advances, so that no wait times out."""

    def now(self) -> float:
        return 0.0


class GatedFolder(DiskFolder):
    """Reads wait until `gate` is set; `reading` is set when one waits."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.gate, self.reading = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def read(self, key: bytes, into: memoryview) -> TieredBlock | None:
        self.threads.add(threading.current_thread().name)
        self.reading.set()
        assert self.gate.wait(30)
        return super().read(key, into)

    def write(self, block: TieredBlock, contents: memoryview) -> bool:
        self.threads.add(threading.current_thread().name)
        return super().write(block, contents)


def tiered(
    folder: Path | None = None,
    proposer: Any = None,
    *,
    slots: int = 64,
    disk_bytes: int = 1 << 30,
    kind: type[DiskFolder] = DiskFolder,
    weights: str = "tiny",
    clock: Clock | None = None,
    **options: Any,
) -> Engine:
    """An engine with 16 blocks on the device."""
    clock = clock or StoppedClock()

    def make(runner: ModelRunner, tables: BlockTables, _: Clock) -> Tiers:
        memory = HostBlocks(runner, slots)
        fingerprint = cache_fingerprint(runner, weights, "none")
        files = None if folder is None else kind(folder, fingerprint, memory.block_bytes)
        return Tiers(tables, memory, TierStore(memory, clock, files, disk_bytes), clock)

    return engine_of(proposer, **{"kv_tokens": 256, "tiers": make, **options})


def folder_of(engine: Engine) -> Any:
    tiers = engine.scheduler.tiers
    assert tiers is not None
    return tiers._store._folder


def store_of(engine: Engine) -> TierStore:
    tiers = engine.scheduler.tiers
    assert tiers is not None
    return tiers._store


def assert_nothing_leased(engine: Engine) -> None:
    store = store_of(engine)
    for _ in range(600):
        if not store.num_unwritten and not store._jobs:  # a write leases its block
            break
        store.wait(0.05)
    for index in (store._host._index, store._disk):
        assert all(entry.leases == 0 for entry in index._entries.values())
    tiers = engine.scheduler.tiers
    assert tiers is not None
    assert tiers._waiting == {}
