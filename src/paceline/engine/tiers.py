"""Moves cached blocks between the device and the tiers below it.

`make_tiers` builds the tiers of an engine from its configuration.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from paceline.core.machine import GIB, total_memory
from paceline.core.sequence import BLOCK_SIZE, Sequence
from paceline.core.status import TierCounts
from paceline.engine.hook import StepHook
from paceline.engine.step.step import StepResult
from paceline.kv import BlockTables, blocks_for, chain_keys
from paceline.kv.tiers import DiskFolder, Fetch, TieredBlock, TierStore
from paceline.model_files import weights_checksum
from paceline.models.blocks import HostBlocks, block_bytes, cache_fingerprint
from paceline.models.runner import ModelRunner

logger = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 10.0
"""Longest time that a sequence waits for its blocks; used if the time to compute them is unknown."""
MIN_WAIT_SECONDS = 0.05
MAX_TRIES = 3
"""Fetches for one sequence: fetched blocks may be evicted before the sequence is scheduled."""
MAX_SAVED_BLOCKS = 8
"""Blocks saved in one call of an idle engine. A new request waits for that call."""
IDLE_SECONDS = 0.005
"""Longest wait for a slow disk in one call of `use_idle_time`."""
CLOSE_SECONDS = 5.0
"""Time for writing unsaved blocks to disk when the engine closes."""


@dataclass(slots=True, eq=False)
class _WaitingSequence:
    """A sequence that is not scheduled yet."""

    keys: Seq[bytes]
    fetch: Fetch | None = None
    deadline: float = math.inf
    tries: int = 0


class Tiers(StepHook):
    """Saves blocks before the device evicts them, and fetches those that a waiting sequence needs. Called by the engine's
    thread only, which never waits for a disk here: the scheduler skips a sequence until its blocks have arrived, or until
    computing them would have been faster.

    Draft models have their own caches, which are not saved. A draft recomputes missing blocks; that affects speed, not text.
    """

    def __init__(self, tables: BlockTables, memory: HostBlocks, store: TierStore, clock: Clock) -> None:
        self._tables, self._pool = tables, tables.pool
        self._memory = memory
        self._store = store
        self._clock = clock
        self._on_device: dict[bytes, TieredBlock] = {}
        """Blocks on the device."""
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()
        """Keys of blocks on the device that may be in no other tier."""
        self._waiting: dict[int, _WaitingSequence] = {}
        self._measured: tuple[int, float] = (0, 0.0)
        self._counts = TierCounts()
        self._listener: Callable[[CacheEvent], None] | None = None
        tables.pool.listen(self._device_changed, self._before_eviction)

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Report events of all tiers to `listener`, starting with the blocks already there. It must not wait, and may be called
        on any thread."""
        self._listener = listener
        self._store.listen(listener)

    def report(self) -> TierCounts:
        """Safe from any thread."""
        host, disk = self._store.num_blocks
        traffic = self._store.traffic
        return replace(
            self._counts,
            host_blocks=host,
            disk_blocks=disk,
            bytes_from_disk=traffic.disk_read,
            bytes_to_disk=traffic.disk_written,
            bad_blocks=traffic.bad,
            dropped_blocks=traffic.dropped,
        )

    def num_below(self, ids: Seq[int], salt: str, first: int) -> int:
        """Number of consecutive blocks of `ids`, from block `first` on and without the last token, in the tiers below."""
        return len(self._store.run(chain_keys(ids[: len(ids) - 1], salt)[first:]))

    def prefetch(self, sequence: Sequence) -> None:
        """Start to fetch the blocks of a sequence that will be scheduled."""
        if sequence.leader is None:  # other choices of a request use the blocks of the first
            self._get_waiting(sequence)

    def is_fetching(self, sequence: Sequence) -> bool:
        """Whether its blocks are being fetched."""
        waiting = self._waiting.get(sequence.id)
        if waiting is None or waiting.fetch is None or waiting.fetch.is_done:
            return False
        return self._clock.now() < waiting.deadline

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the sequence can be scheduled now; False while its blocks are being fetched."""
        if self.is_fetching(sequence):
            return False
        waiting = self._get_waiting(sequence)
        if waiting.fetch is not None and not waiting.fetch.is_done:  # the deadline has passed
            waiting.tries = MAX_TRIES
        self._start_fetch(waiting)
        return not self.is_fetching(sequence)

    def load(self, sequence: Sequence) -> int:
        """Load the blocks of a sequence from host memory into its open block table. Returns their number of tokens."""
        waiting = self._waiting.pop(sequence.id, None)
        if waiting is None:
            return 0
        start = sequence.num_computed // BLOCK_SIZE
        keys = waiting.keys[start : start + self._pool.num_free]
        slots = self._store.lease(keys)
        keys = keys[: len(slots)]
        if slots:
            end = (start + len(slots)) * BLOCK_SIZE
            grown = self._tables.grow(sequence.id, end)
            assert grown
            self._memory.load(slots, self._tables.blocks(sequence.id)[start:])
            self._tables.publish(sequence.id, sequence.ids, end)
            self._store.release(keys)
        from_disk = 0 if waiting.fetch is None else len(waiting.fetch.from_disk.intersection(keys))
        if waiting.fetch is not None:
            self._store.finish(waiting.fetch)
        self._count(
            device_hits=sequence.num_computed,
            host_hits=(len(slots) - from_disk) * BLOCK_SIZE,
            disk_hits=from_disk * BLOCK_SIZE,
            bytes_from_host=len(slots) * self._memory.block_bytes,
        )
        return len(slots) * BLOCK_SIZE

    def cancel(self, sequence: Sequence) -> None:
        """Stop fetching for a sequence that will not be scheduled."""
        waiting = self._waiting.pop(sequence.id, None)
        if waiting is not None and waiting.fetch is not None:
            self._store.finish(waiting.fetch)

    def verified(self, result: StepResult) -> None:
        """Measure how fast the device computes tokens. Passes without logits do not wait for the device: their tokens are added
        to the next pass that does."""
        if result.is_graph:
            return
        self._measured = self._measured[0] + result.num_tokens, self._measured[1] + result.verify_seconds
        if any(sequence_result.verdict is not None for sequence_result in result.sequences):
            self._store.rates.observe_compute(*self._measured)
            self._measured = 0, 0.0

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for fetches when no sequence can be scheduled."""
        if self._waiting:
            self._store.wait(seconds)

    @property
    def has_idle_work(self) -> bool:
        return self.has_unsaved

    def use_idle_time(self) -> None:
        self.save_some(IDLE_SECONDS)

    @property
    def has_unsaved(self) -> bool:
        """Whether a restart would lose blocks."""
        return self._store.has_disk and bool(self._unsaved)

    def save_some(self, seconds: float) -> None:
        """Save a few blocks, or wait up to `seconds` for a slow disk. Call it when the engine is idle."""
        if not self.has_unsaved:
            return
        # Blocks that wait for the disk must not evict each other
        free = self._memory.num_slots // 2 - self._store.num_unwritten
        if free > 0:
            self._save(min(free, MAX_SAVED_BLOCKS))
        else:
            self._store.wait(seconds)

    def close(self) -> None:
        """Save blocks that a restart would lose, for up to `CLOSE_SECONDS`. Safe to call twice."""
        end = self._clock.now() + CLOSE_SECONDS
        while self.has_unsaved and self._clock.now() < end:
            self.save_some(0.05)
        self._unsaved.clear()
        self._store.close(max(0.0, end - self._clock.now()))

    def _get_waiting(self, sequence: Sequence) -> _WaitingSequence:
        waiting = self._waiting.get(sequence.id)
        if waiting is None:
            ids = sequence.cacheable_ids
            waiting = self._waiting[sequence.id] = _WaitingSequence(
                chain_keys(ids[: len(ids) - 1], sequence.cache_salt)
            )
            self._start_fetch(waiting)
        return waiting

    def _start_fetch(self, waiting: _WaitingSequence) -> None:
        """Start to fetch its blocks that are neither on the device nor in host memory."""
        if waiting.tries >= MAX_TRIES or not self._store.has_disk:
            return
        keys = waiting.keys[len(self._pool.find(waiting.keys)) :]
        tiers = self._store.run(keys)
        if "disk" not in tiers or not self._store.rates.pays("disk"):
            return
        if waiting.fetch is not None:
            self._store.finish(waiting.fetch)
        waiting.fetch, waiting.tries = Fetch(keys[: len(tiers)]), waiting.tries + 1
        computing = self._store.rates.seconds_to_compute(len(tiers) * BLOCK_SIZE)
        wait_seconds = (
            MAX_WAIT_SECONDS if computing is None else min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, computing))
        )
        waiting.deadline = self._clock.now() + wait_seconds
        self._store.begin(waiting.fetch)

    def _device_changed(self, event: CacheEvent) -> None:
        """Record an event of the device's cache and forward it."""
        if isinstance(event, BlocksStored):
            block = TieredBlock.of(event)
            self._on_device[block.key] = block
            self._unsaved[block.key] = None
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                assert isinstance(key, bytes)
                self._on_device.pop(key, None)
                self._unsaved.pop(key, None)
        if self._listener is not None:
            self._listener(event)

    def _before_eviction(self, evicted: Seq[tuple[int, bytes]]) -> None:
        self._copy({key: block for block, key in evicted})

    def _save(self, count: int) -> None:
        batch: dict[bytes, int] = {}
        while self._unsaved and len(batch) < count:
            key, _ = self._unsaved.popitem(last=False)
            block = self._pool.block_of(key)
            if block is not None and key not in self._store:
                batch[key] = block
        self._copy(batch)

    def _copy(self, blocks: dict[bytes, int]) -> None:
        """Copy blocks to host memory; the store writes them to disk later."""
        pairs = self._store.reserve([self._on_device[key] for key in blocks])
        if pairs:
            self._memory.save([blocks[block.key] for block, _ in pairs], [slot for _, slot in pairs])
            self._store.stored(pairs)
            self._count(bytes_to_host=len(pairs) * self._memory.block_bytes)

    def _count(self, **added: int) -> None:
        self._counts = replace(
            self._counts, **{name: getattr(self._counts, name) + count for name, count in added.items()}
        )


DISK_HOST_BYTES = GIB
"""Size of the host tier if only a disk is configured: blocks pass through it. Larger if one sequence of full length needs more,
up to a quarter of the machine's memory."""
MIN_SLOTS = 16
"""Blocks that a tier must have room for."""


def make_tiers(
    config: EngineConfig, runner: ModelRunner, tables: BlockTables, clock: Clock, window: int
) -> Tiers | None:
    """The tiers. None if the device is the only tier. `window` is the number of tokens of the longest sequence."""
    each, host_bytes = block_bytes(runner), config.kv_host_bytes
    if host_bytes is None and config.kv_disk is not None:
        host_bytes = min(max(DISK_HOST_BYTES, blocks_for(window) * each), total_memory() // 4)
    if not host_bytes:
        return None
    num_slots = host_bytes // each
    if num_slots < MIN_SLOTS:
        raise InvalidConfig(
            f"kv_host_bytes ({host_bytes}) is too small for this model: set at least {MIN_SLOTS * each}, or 0 for none"
        )
    folder = None if config.kv_disk is None else _open_folder(config, runner, each)
    try:
        memory = HostBlocks(runner, num_slots)
    except RuntimeError as error:  # torch raises it if the memory cannot be allocated
        if folder is not None:
            folder.close()
        raise OutOfMemory(f"kv_host_bytes ({host_bytes}) cannot be allocated: {error}; set it lower") from None
    tiers = Tiers(tables, memory, TierStore(memory, clock, folder, config.kv_disk_bytes), clock)
    report = tiers.report()
    logger.info(
        "the cache has %d blocks in host memory%s",
        num_slots,
        "" if folder is None else f", and {report.disk_blocks} saved blocks on disk in {folder.folder}",
    )
    return tiers


def _open_folder(config: EngineConfig, runner: ModelRunner, each: int) -> DiskFolder:
    assert config.kv_disk is not None
    fingerprint = cache_fingerprint(
        runner, weights_checksum(config.model), f"{config.quantization} {config.activations}"
    )
    folder = DiskFolder(Path(config.kv_disk).expanduser(), fingerprint, each)
    if config.kv_disk_bytes < MIN_SLOTS * folder.file_bytes:
        folder.close()
        raise InvalidConfig(
            f"kv_disk_bytes ({config.kv_disk_bytes}) is too small for this model: set at least "
            f"{MIN_SLOTS * folder.file_bytes}"
        )
    return folder
