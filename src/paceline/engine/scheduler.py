"""Which sequences take part in the next pass, with how many rows each."""

import bisect
from collections.abc import Sequence as Seq

from paceline.core.sequence import Sequence, Status
from paceline.engine.hooks.tiers import Tiers
from paceline.engine.schedule import Schedule, Scheduled
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables, blocks_for


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """Who is served first; the last in this order is preempted first."""
    return sequence.priority, sequence.arrival, sequence.id


def _is_under_way(sequence: Sequence, reading: Seq[Sequence]) -> bool:
    """Whether this pass computes a block of it for somebody ranked before it, of those `reading` their prompts: in the next one
    it is cached. That is no long wait: rows are left for newcomers only in a pass that ends the prompts of all who run."""
    ids, salt = sequence.cacheable_ids, sequence.cache_salt
    for other in reading:
        if other.cache_salt != salt or _rank(other) > _rank(sequence):
            continue
        end = (other.num_computed // BLOCK_SIZE + 1) * BLOCK_SIZE
        if end < len(ids) and other.ids[:end] == ids[:end]:  # a hit leaves the last token to compute
            return True
    return False


class Scheduler:
    """Continuous batching over a paged cache. Owns placement: queues, block tables, and `num_computed` after preemption.

    Running sequences come first, one row each at least; a sequence that needs a block when none is free preempts the
    lowest-ranked one. Drafts take only what is left over: speculation never pushes anybody out. Waiting sequences join while
    rows, blocks and seats last.
    """

    def __init__(
        self, tables: BlockTables, max_num_seqs: int, max_batched_tokens: int, tiers: Tiers | None = None
    ) -> None:
        """`tiers`: the cache tiers below the device; None: there are none."""
        self.tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []  # both kept in rank order
        self.num_preemptions = 0
        self.tiers = tiers

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts, what is yet to be computed. Safe from any thread."""
        return sum(s.num_uncomputed for s in (*self.waiting, *self.running) if s.num_uncomputed > 1)

    @property
    def may_admit(self) -> bool:
        """Whether a pass would let somebody in: there is a seat, and the first who waits for nothing else finds room, once
        those who run give back what they hold beyond their text."""
        if len(self.running) >= self.max_num_seqs:
            return False
        for sequence in self.waiting:
            if self.tiers is None or not self.tiers.is_fetching(sequence):
                spare = self.tables.pool.num_free - self._needed(sequence, len(self.running))
                return spare >= 0 or spare + self._num_idle >= 0
        return False

    @property
    def prompt_rows(self) -> int:
        """Of prompts that the next pass would compute, if it has room for all."""
        newcomers = self.waiting[: self.max_num_seqs - len(self.running)] if self.may_admit else ()
        return sum([count for s in (*self.running, *newcomers) if (count := s.num_uncomputed) > 1])

    @property
    def is_full(self) -> bool:
        """Whether prompts leave no row of the next pass for drafts."""
        return len(self.running) + self.prompt_rows >= self.max_batched_tokens

    @property
    def _num_idle(self) -> int:
        """Blocks that those who run hold beyond their text."""
        return sum(len(self.tables.blocks(s.id)) - blocks_for(len(s.ids)) for s in self.running)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)
        if self.tiers is not None:
            self.tiers.prefetch(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its blocks at once."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        self.tables.close(sequence.id)
        if self.tiers is not None:
            self.tiers.cancel(sequence)
        sequence.status = Status.FINISHED

    def schedule(self) -> Schedule:
        preempted: list[Sequence] = []
        rows: dict[Sequence, int] = {}
        budget = self.max_batched_tokens
        budget -= self._schedule_running(rows, budget, preempted)
        if not preempted:
            self._admit(rows, budget)
        drafts = self._reserve_drafts(rows)
        items = tuple(Scheduled(sequence, count, drafts.get(sequence, 0)) for sequence, count in rows.items())
        return Schedule(items, tuple(preempted))

    def _schedule_running(self, rows: dict[Sequence, int], budget: int, preempted: list[Sequence]) -> int:
        used = 0
        waiting_for_a_row = len(self.running)
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING:  # preempted a moment ago, for somebody ranked higher
                continue
            waiting_for_a_row -= 1
            # A long prompt leaves one row for each sequence behind it: nobody's decoding stalls.
            count = min(sequence.num_uncomputed, max(1, budget - used - waiting_for_a_row))
            while not self.tables.grow(sequence.id, sequence.num_computed + count):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                used -= rows.pop(victim, 0)
                if victim is sequence:
                    break
            else:
                rows[sequence] = count
                used += count
        return used

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; its tokens stay, and are computed again when it is its turn."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.running.remove(sequence)
        self.tables.close(sequence.id)
        sequence.num_computed = 0
        sequence.status = Status.WAITING
        self.add(sequence)

    def _admit(self, rows: dict[Sequence, int], budget: int) -> None:
        taken = len(self.running)  # seats, those included that are kept for who joins in the next pass
        reading = [sequence for sequence in self.running if sequence.is_prefilling]
        for sequence in list(self.waiting):
            if budget <= 0 or taken >= self.max_num_seqs:
                return
            if self.tables.prefix_caching and _is_under_way(sequence, reading):
                taken += 1  # nobody ranked after it gets in its way
                continue
            if self.tables.prefix_caching and self._waits_for_leader(sequence):
                continue
            if self.tiers is not None and not self.tiers.is_ready(sequence):
                continue
            if self.running and self._needed(sequence, taken) > self.tables.pool.num_free:
                return
            sequence.num_computed = self.tables.open(sequence.id, sequence.cacheable_ids, sequence.cache_salt)
            if self.tiers is not None:
                sequence.num_computed += self.tiers.load(sequence)
            count = min(sequence.num_uncomputed, budget)
            if not self.tables.grow(sequence.id, sequence.num_computed + count):
                self.tables.close(sequence.id)
                sequence.num_computed = 0
                return
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=_rank)
            sequence.status = Status.RUNNING
            if sequence.is_prefilling:
                reading.append(sequence)
            if not sequence.num_preemptions:  # after one, a hit is its own earlier work
                sequence.num_cached = sequence.num_computed
            rows[sequence] = count
            budget -= count
            taken += 1

    def _needed(self, sequence: Sequence, taken: int) -> int:
        """Blocks for the whole of it so far, and one for it and for every other one to speculate and grow into."""
        cached, _ = self.tables.find(sequence.cacheable_ids, sequence.cache_salt)
        return blocks_for(len(sequence.ids)) - len(cached) + self.tables.pool.num_unheld(cached) + 1 + taken

    @staticmethod
    def _waits_for_leader(sequence: Sequence) -> bool:
        """Whether its prompt is yet to be computed, by the first choice of the same request."""
        leader = sequence.leader
        return leader is not None and leader.is_prefilling and not leader.is_finished

    def _reserve_drafts(self, rows: dict[Sequence, int]) -> dict[Sequence, int]:
        """Slots for drafts, of what nobody else needs: whatever is not there is not drafted."""
        budget = self.max_batched_tokens - sum(rows.values())
        drafts: dict[Sequence, int] = {}
        for sequence, count in rows.items():
            if sequence.depth == 0 or count != sequence.num_uncomputed:
                continue
            end = sequence.num_computed + count
            spare = self.tables.capacity(sequence.id) - end + self.tables.pool.num_free * BLOCK_SIZE
            draft = min(sequence.depth, budget, spare)
            if draft > 0:
                self.tables.grow(sequence.id, end + draft)
                drafts[sequence] = draft
                budget -= draft
        return drafts
