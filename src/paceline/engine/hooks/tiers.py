"""Cached blocks on their way between the device and the tiers below it."""

import math
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.core.clock import Clock
from paceline.core.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from paceline.core.sequence import Sequence
from paceline.core.worker_status import TierCounts
from paceline.engine.executors.executor import StepResult
from paceline.engine.hooks.hook import StepHook
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables
from paceline.kv.prefix import chain_keys
from paceline.kv.tiers.block import TieredBlock
from paceline.kv.tiers.fetch import Fetch
from paceline.kv.tiers.store import TierStore
from paceline.models.host_blocks import HostBlocks

LONGEST_WAIT = 10.0
"""Seconds that a sequence waits for its blocks, where nobody knows how long computing them would take."""
SHORTEST_WAIT = 0.05
MAX_TRIES = 3
"""How often a sequence waits: what came for it may be pushed out again before its turn."""
SAVED_AT_ONCE = 8
"""Blocks copied in one turn of an idle engine: a request that comes meanwhile waits for so many."""
IDLE_SECONDS = 0.005
"""Longest wait for a slow disk in one call of `use_idle_time`."""
CLOSE_SECONDS = 5.0
"""What is not on disk yet when the engine closes is written for so long."""


@dataclass(slots=True, eq=False)
class _Visit:
    """A sequence before its turn."""

    keys: Seq[bytes]
    fetch: Fetch | None = None
    deadline: float = math.inf
    tries: int = 0


class Tiers(StepHook):
    """Rescues blocks that the device is about to lose, and brings back those that a waiting sequence will need. The engine's
    thread alone calls it, and never waits here for a disk: a sequence whose blocks are on their way is passed over until they
    are there, or computing them would have been quicker.

    Drafts keep caches of their own, which are not saved: what a draft lacks it computes again when it is asked, and what it
    then says changes the speed and not the text.
    """

    def __init__(self, tables: BlockTables, memory: HostBlocks, store: TierStore, clock: Clock) -> None:
        self._tables, self._pool = tables, tables.pool
        self._memory = memory
        self._store = store
        self._clock = clock
        self._known: dict[bytes, TieredBlock] = {}
        """What is on the device."""
        self._unsaved: OrderedDict[bytes, None] = OrderedDict()
        """Of that, what may be in no other tier."""
        self._visits: dict[int, _Visit] = {}
        self._pass: tuple[int, float] = (0, 0.0)
        self._report = TierCounts()
        self._listener: Callable[[CacheEvent], None] | None = None
        tables.pool.listen(self._device_changed, self._before_eviction)

    def listen(self, listener: Callable[[CacheEvent], None]) -> None:
        """Tell `listener` of all tiers, from now on and what is there already. It must not wait, and may be called on any
        thread."""
        self._listener = listener
        self._store.listen(listener)

    def report(self) -> TierCounts:
        """Safe from any thread."""
        host, disk = self._store.num_blocks
        traffic = self._store.traffic
        return replace(
            self._report,
            host_blocks=host,
            disk_blocks=disk,
            bytes_from_disk=traffic.disk_read,
            bytes_to_disk=traffic.disk_written,
            bad_blocks=traffic.bad,
            dropped_blocks=traffic.dropped,
        )

    def below(self, ids: Seq[int], salt: str, first: int) -> int:
        """Blocks of `ids` from number `first` on, their last token left out, that are in the tiers below."""
        return len(self._store.run(chain_keys(ids[: len(ids) - 1], salt)[first:]))

    def seek(self, sequence: Sequence) -> None:
        """It will be scheduled: what it needs of the lower tiers should be near by then."""
        if sequence.leader is None:  # the other choices of a request find what the first has computed
            self._visit(sequence)

    def is_coming(self, sequence: Sequence) -> bool:
        """Whether its blocks are on their way."""
        visit = self._visits.get(sequence.id)
        if visit is None or visit.fetch is None or visit.fetch.is_done:
            return False
        return self._clock.now() < visit.deadline

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether it should be scheduled now. If not, it will be soon."""
        if self.is_coming(sequence):
            return False
        visit = self._visit(sequence)
        if visit.fetch is not None and not visit.fetch.is_done:  # it took too long
            visit.tries = MAX_TRIES
        self._begin(visit)
        return not self.is_coming(sequence)

    def land(self, sequence: Sequence) -> int:
        """Its table is open: add to it what the host's memory has of the sequence. Returns how many tokens that is."""
        visit = self._visits.pop(sequence.id, None)
        if visit is None:
            return 0
        start = sequence.num_computed // BLOCK_SIZE
        keys = visit.keys[start : start + self._pool.num_free]
        slots = self._store.lease(keys)
        keys = keys[: len(slots)]
        if slots:
            end = (start + len(slots)) * BLOCK_SIZE
            grown = self._tables.grow(sequence.id, end)
            assert grown
            self._memory.load(slots, self._tables.blocks(sequence.id)[start:])
            self._tables.publish(sequence.id, sequence.ids, end)
            self._store.release(keys)
        from_disk = 0 if visit.fetch is None else len(visit.fetch.from_disk.intersection(keys))
        if visit.fetch is not None:
            self._store.finish(visit.fetch)
        self._count(
            device_hits=sequence.num_computed,
            host_hits=(len(slots) - from_disk) * BLOCK_SIZE,
            disk_hits=from_disk * BLOCK_SIZE,
            bytes_from_host=len(slots) * self._memory.block_bytes,
        )
        return len(slots) * BLOCK_SIZE

    def forget(self, sequence: Sequence) -> None:
        """It will not be scheduled after all."""
        visit = self._visits.pop(sequence.id, None)
        if visit is not None and visit.fetch is not None:
            self._store.finish(visit.fetch)

    def verified(self, result: StepResult) -> None:
        """Learn how fast the device computes tokens. Passes without logits do not wait for the device: they are added up until
        one does."""
        if result.is_graph:
            return
        self._pass = self._pass[0] + result.num_tokens, self._pass[1] + result.verify_seconds
        if any(one.verdict is not None for one in result.sequences):
            self._store.rates.computed(*self._pass)
            self._pass = 0, 0.0

    def wait(self, seconds: float) -> None:
        """Nobody can be scheduled: until that may have changed, but no longer than so."""
        if self._visits:
            self._store.wait(seconds)

    @property
    def has_idle_work(self) -> bool:
        return self.has_unsaved

    def use_idle_time(self) -> None:
        self.save_some(IDLE_SECONDS)

    @property
    def has_unsaved(self) -> bool:
        """Whether there is something that a restart would lose."""
        return self._store.has_disk and bool(self._unsaved)

    def save_some(self, seconds: float) -> None:
        """The engine has nothing else to do: save a little, or wait so long for a disk that is behind."""
        if not self.has_unsaved:
            return
        # Those that wait for the disk must not push each other out
        room = self._memory.num_slots // 2 - self._store.num_unwritten
        if room > 0:
            self._save(min(room, SAVED_AT_ONCE))
        else:
            self._store.wait(seconds)

    def close(self) -> None:
        """Save what a restart would lose, as far as that goes in `CLOSE_SECONDS`. Safe to call twice."""
        end = self._clock.now() + CLOSE_SECONDS
        while self.has_unsaved and self._clock.now() < end:
            self.save_some(0.05)
        self._unsaved.clear()
        self._store.close(max(0.0, end - self._clock.now()))

    def _visit(self, sequence: Sequence) -> _Visit:
        visit = self._visits.get(sequence.id)
        if visit is None:
            ids = sequence.cacheable_ids
            visit = self._visits[sequence.id] = _Visit(chain_keys(ids[: len(ids) - 1], sequence.cache_salt))
            self._begin(visit)
        return visit

    def _begin(self, visit: _Visit) -> None:
        """Fetch what of its blocks is neither on the device nor in the host's memory."""
        if visit.tries >= MAX_TRIES or not self._store.has_disk:
            return
        keys = visit.keys[len(self._pool.find(visit.keys)) :]
        tiers = self._store.run(keys)
        if "disk" not in tiers or not self._store.rates.is_worth("disk"):
            return
        if visit.fetch is not None:
            self._store.finish(visit.fetch)
        visit.fetch, visit.tries = Fetch(keys[: len(tiers)]), visit.tries + 1
        computing = self._store.rates.seconds_to_compute(len(tiers) * BLOCK_SIZE)
        patience = LONGEST_WAIT if computing is None else min(LONGEST_WAIT, max(SHORTEST_WAIT, computing))
        visit.deadline = self._clock.now() + patience
        self._store.begin(visit.fetch)

    def _device_changed(self, event: CacheEvent) -> None:
        """What the device's cache says."""
        if isinstance(event, BlocksStored):
            block = TieredBlock.of(event)
            self._known[block.key] = block
            self._unsaved[block.key] = None
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                assert isinstance(key, bytes)
                self._known.pop(key, None)
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
        """Down to the host's memory, and from there to disk in its time."""
        pairs = self._store.reserve([self._known[key] for key in blocks])
        if pairs:
            self._memory.save([blocks[block.key] for block, _ in pairs], [slot for _, slot in pairs])
            self._store.stored(pairs)
            self._count(bytes_to_host=len(pairs) * self._memory.block_bytes)

    def _count(self, **added: int) -> None:
        self._report = replace(
            self._report, **{name: getattr(self._report, name) + count for name, count in added.items()}
        )
