"""The tiers below the device: host memory and disk."""

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.core.clock import Clock
from paceline.core.kv_events import BlocksRemoved, CacheEvent, Tier
from paceline.core.sequence import BLOCK_SIZE
from paceline.kv.tiers.block import LoadRates, TieredBlock, parents_first
from paceline.kv.tiers.tiers import DiskFolder, EvictionIndex, Fetch, HostTier, SlotMemory, TierTraffic

logger = logging.getLogger(__name__)

TROUBLE_SECONDS = 30.0
"""Pause after a failed write."""


class TierStore:
    """The blocks in host memory and on disk. The engine's thread never waits for the disk: a thread of the store reads and
    writes. A block on disk stays in host memory too until its slot is needed."""

    def __init__(self, memory: SlotMemory, clock: Clock, folder: DiskFolder | None = None, disk_bytes: int = 0) -> None:
        self.memory = memory
        self.rates = LoadRates()
        self.traffic = TierTraffic()
        self._listener: Callable[[CacheEvent], None] | None = None
        self._clock = clock
        self._folder, self._disk_bytes = folder, disk_bytes
        self._changed = threading.Condition()  # guards everything below
        self._host, self._disk = HostTier(memory.num_slots), EvictionIndex()
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        self._jobs: deque[Fetch] = deque()
        self._closing: float | None = None
        self._trouble_until = 0.0
        self._thread: threading.Thread | None = None
        if folder is not None:
            for block in folder.scan():
                self._disk.add(block)
            self._make_room(0)
            self._thread = threading.Thread(target=self._run, name="paceline-tiers", daemon=True)
            self._thread.start()

    def run(self, keys: Sequence[bytes]) -> list[Tier]:
        """The tiers of the longest stored prefix of `keys`. A block in host memory and on disk counts as `host`."""
        tiers: list[Tier] = []
        with self._changed:
            for key in keys:
                if key in self._host:
                    tiers.append("host")
                elif key in self._disk:
                    tiers.append("disk")
                else:
                    break
        return tiers

    def __contains__(self, key: object) -> bool:
        with self._changed:
            return key in self._host or key in self._disk

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Report the blocks of the two tiers, and every change, to `listener`. It may run on the engine's or on the store's
        thread, and must not block."""
        self._listener = listener
        self._announce()

    def _announce(self) -> None:
        with self._changed:
            for block in parents_first(self._disk):
                self._tell(block.stored("disk"))
            for block in self._host.blocks:
                self._tell(block.stored("host"))

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Blocks in host memory and on disk."""
        return len(self._host), len(self._disk)

    @property
    def num_unwritten(self) -> int:
        """Blocks that wait to be written."""
        return len(self._unwritten)

    @property
    def has_disk(self) -> bool:
        return self._folder is not None

    def reserve(self, blocks: Sequence[TieredBlock]) -> list[tuple[TieredBlock, int]]:
        """Take slots for blocks that are not in host memory yet, as far as there are any. Fill them, then call `stored`."""
        pairs = []
        with self._changed:
            for block in blocks:
                if block.key in self._host:
                    self._host.use(block.key)
                elif (slot := self._take_slot()) is not None:
                    pairs.append((block, slot))
                else:
                    self._count(dropped=1)
        return pairs

    def stored(self, pairs: Sequence[tuple[TieredBlock, int]]) -> None:
        """The slots are filled, or will be when `memory.wait` returns."""
        with self._changed:
            for block, slot in pairs:
                self._add(block, slot)
                if self._folder is not None and block.key not in self._disk:
                    self._unwritten[block.key] = None
            self._changed.notify_all()

    def begin(self, fetch: Fetch) -> None:
        """Start to load its blocks into host memory; `is_done` is set at the end."""
        with self._changed:
            self._jobs.append(fetch)
            self._changed.notify_all()

    def finish(self, fetch: Fetch) -> None:
        """Release the blocks of a fetch, and cancel it if it still runs."""
        with self._changed:
            fetch.cancelled = True
            if fetch.is_done:
                self._let_go(fetch)
            elif fetch in self._jobs:
                self._jobs.remove(fetch)
                fetch.is_done = True

    def lease(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the longest prefix of `keys` in host memory. The blocks stay there until `release`."""
        with self._changed:
            run = self._host.run(keys)
            for key in reversed(run):  # the head of a chain is evicted last
                self._host.lease(key)
                self._host.use(key)
                if key in self._disk:
                    self._disk.use(key)
            return [self._host.get(key)[1] for key in run]

    def release(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            for key in keys:
                self._host.release(key)

    def wait(self, seconds: float) -> None:
        """Wait for a change, for at most `seconds`."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self, seconds: float) -> None:
        """Write unwritten blocks for at most `seconds`, then stop. Safe to call twice."""
        with self._changed:
            if self._closing is None:
                self._closing = self._clock.now() + seconds
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self._folder is not None:
            self._folder.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._unwritten or self._closing is not None)
                job = self._jobs.popleft() if self._jobs else None
                if job is None and (not self._unwritten or self._is_late()):
                    return
            try:
                if job is not None:
                    self._bring(job)
                else:
                    self._write_next()
            except Exception:  # a failing tier costs time, never a request
                logger.exception("a cache tier failed; the block is skipped")

    def _is_late(self) -> bool:
        return self._closing is not None and self._clock.now() >= self._closing

    def _bring(self, fetch: Fetch) -> None:
        try:
            for key in fetch.keys:
                if not self._bring_one(fetch, key):
                    return
        finally:
            with self._changed:
                fetch.is_done = True
                if fetch.cancelled:
                    self._let_go(fetch)
                self._changed.notify_all()

    def _bring_one(self, fetch: Fetch, key: bytes) -> bool:
        """Returns False if the fetch ends here."""
        assert self._folder is not None
        with self._changed:
            if fetch.cancelled or self._closing is not None:
                return False
            if key in self._host:
                self._hold(fetch, key)
                return True
            slot = self._take_slot() if key in self._disk else None
            if slot is None:
                return False
            self._disk.lease(key)
        self.memory.wait(slot)
        started = self._clock.now()
        block = self._folder.read(key, self.memory.view(slot))
        seconds = self._clock.now() - started
        with self._changed:
            self._disk.release(key)
            if block is None:
                self._host.give_back(slot)
                self._drop_from_disk(key)
                self._count(bad=1)
                return False
            self.rates.observe_load("disk", BLOCK_SIZE, seconds)
            self._count(disk_read=self.memory.block_bytes)
            self._add(block, slot)
            self._hold(fetch, key)
            fetch.from_disk.add(key)
        return True

    def _write_next(self) -> None:
        assert self._folder is not None
        with self._changed:
            if not self._unwritten:
                return
            key = next(iter(self._unwritten))
            block, slot = self._host.get(key)
            self._host.lease(key)
        is_kept = False
        try:
            is_kept = self._write(block, slot)
        finally:
            with self._changed:
                self._host.release(key)
                del self._unwritten[key]
                if is_kept:
                    self._disk.add(block)
                    self._host.back(key)
                    self._tell(block.stored("disk"))
                    self._count(disk_written=self.memory.block_bytes)
                else:
                    self._count(dropped=1)
                self._changed.notify_all()

    def _write(self, block: TieredBlock, slot: int) -> bool:
        assert self._folder is not None
        if self._clock.now() < self._trouble_until:
            return False
        try:
            self._make_room(1)
            self.memory.wait(slot)
            return self._folder.write(block, self.memory.view(slot))
        except OSError as error:
            self._trouble_until = self._clock.now() + TROUBLE_SECONDS
            logger.warning(
                "cannot write blocks to %s: %s; next attempt in %.0f s",
                self._folder.folder,
                error,
                TROUBLE_SECONDS,
            )
            return False

    def _make_room(self, count: int) -> None:
        """Evict blocks from disk until there is room for `count` more."""
        assert self._folder is not None
        while True:
            with self._changed:
                is_over = (len(self._disk) + count) * self._folder.file_bytes > self._disk_bytes
                key = self._disk.oldest() if is_over else None
                if key is None:
                    return
                self._drop_from_disk(key)
            self._folder.remove(key)

    # With the lock held:

    def _take_slot(self) -> int | None:
        """An empty slot, or that of the least recently used block. Blocks that are not on disk yet are evicted last."""
        slot, key = self._host.take(self._unwritten)
        if key is not None:
            if key in self._unwritten:
                del self._unwritten[key]
                self._count(dropped=1)
            self._tell(BlocksRemoved((key,), "host"))
        return slot

    def _add(self, block: TieredBlock, slot: int) -> None:
        if self._host.add(block, slot):
            self._tell(block.stored("host"))
        if block.key in self._disk:
            self._host.back(block.key)

    def _drop_from_disk(self, key: bytes) -> None:
        self._disk.remove(key)
        self._host.unback(key)
        self._tell(BlocksRemoved((key,), "disk"))

    def _hold(self, fetch: Fetch, key: bytes) -> None:
        self._host.lease(key)
        self._host.use(key)
        fetch.leased.append(key)

    def _let_go(self, fetch: Fetch) -> None:
        for key in fetch.leased:
            self._host.release(key)
        fetch.leased.clear()

    def _count(self, **added: int) -> None:
        self.traffic = replace(
            self.traffic, **{name: getattr(self.traffic, name) + count for name, count in added.items()}
        )

    def _tell(self, event: CacheEvent) -> None:
        if self._listener is not None:
            self._listener(event)
