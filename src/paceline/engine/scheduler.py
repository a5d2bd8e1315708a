"""Chooses the sequences of the next step and the tokens scheduled for each."""

import bisect
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

from paceline.core.sequence import BLOCK_SIZE, Sequence, Status
from paceline.engine.step.step import Schedule, Scheduled
from paceline.engine.tiers import Tiers
from paceline.kv import BlockTables, blocks_for
from paceline.policy.step import admits, chunk_tokens, ends_inside_piece


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """Order of service; the last in this order is preempted first."""
    return sequence.priority, sequence.arrival, sequence.id


def _shares_prefill(sequence: Sequence, prefilling: Seq[Sequence]) -> bool:
    """Whether this step computes a block of its prompt for a sequence of higher rank, so that the next step finds it cached.
    The wait is short: a step admits sequences only if it completes the prompts of all that run."""
    ids, salt = sequence.cacheable_ids, sequence.cache_salt
    # The last token is always computed, so a prompt this short has no block that could be found in the cache.
    if len(ids) <= BLOCK_SIZE:
        return False
    for other in prefilling:
        if other.cache_salt != salt or _rank(other) > _rank(sequence):
            continue
        end = (other.num_computed // BLOCK_SIZE + 1) * BLOCK_SIZE
        if end < len(ids) and other.ids[:end] == ids[:end]:  # a hit leaves the last token to compute
            return True
    return False


class Scheduler:
    """Continuous batching over a paged cache. Owns the queues, the block tables, and `num_computed` after preemption.

    Running sequences come first, with at least one token each. A sequence that needs a block when none is free preempts the one
    of lowest rank. Drafts get only the remaining tokens and blocks: speculation never preempts. Waiting sequences are admitted
    while tokens, blocks and `max_num_seqs` last.
    """

    def __init__(
        self,
        tables: BlockTables,
        max_num_seqs: int,
        max_batched_tokens: int,
        tiers: Tiers | None = None,
        max_draft_tokens: int | None = None,
        prompt_piece: int | None = None,
    ) -> None:
        """`tiers` are the cache tiers below the device, None if there are none. `max_draft_tokens` limits the draft tokens of
        one step. If None, it equals `max_batched_tokens`. `prompt_piece` is `ModelRunner.prompt_piece`."""
        self.tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.max_draft_tokens = max_batched_tokens if max_draft_tokens is None else max_draft_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []  # like `running`, in rank order
        self.num_preemptions = 0
        self.tiers = tiers
        self._prompt_piece = prompt_piece
        self._held_back: Sequence | None = None
        """The prompt that waited last for room. It does not wait twice: prompts of higher rank may arrive in every step."""
        self._only: Collection[Sequence] | None = None
        self._max_prompt_tokens: int | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens still to be computed, of all sequences. Safe from any thread."""
        return sum(s.num_uncomputed for s in (*self.waiting, *self.running) if s.num_uncomputed > 1)

    @property
    def may_admit(self) -> bool:
        """Whether the next step can admit a sequence: fewer than `max_num_seqs` run, and the first that waits for no tier
        finds blocks, those that running sequences hold in reserve included."""
        if len(self.running) >= self.max_num_seqs:
            return False
        for sequence in self.waiting:
            if self.tiers is None or not self.tiers.is_fetching(sequence):
                need, free = self._needed(sequence, len(self.running)), self.tables.pool.num_free
                free = free if need <= free else free + self._num_idle
                return admits(need, free, len(self.running), self.max_num_seqs)
        return False

    def prompt_rows(self, excluded: Collection[int] = ()) -> int:
        """Prompt tokens that the next step would compute if its budget were large enough, without these sequences."""
        newcomers = self.waiting[: self.max_num_seqs - len(self.running)] if self.may_admit else ()
        prompts = [s for s in (*self.running, *newcomers) if s.id not in excluded]
        return sum([count for s in prompts if (count := s.num_uncomputed) > 1])

    def is_full(self, prompt_rows: int) -> bool:
        """Whether `prompt_rows` prompt rows take all tokens of the next step, so that none is left for drafts."""
        return len(self.running) + prompt_rows >= self.max_batched_tokens

    @property
    def _num_idle(self) -> int:
        """Blocks that running sequences hold beyond their committed tokens."""
        return sum(len(self.tables.blocks(s.id)) - blocks_for(len(s.ids)) for s in self.running)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)
        if self.tiers is not None:
            self.tiers.prefetch(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and free its blocks."""
        queue = self.running if sequence.status is Status.RUNNING else self.waiting
        queue.remove(sequence)
        self.tables.close(sequence.id)
        if self.tiers is not None:
            self.tiers.cancel(sequence)
        sequence.status = Status.FINISHED

    def limit_prompts(self, max_tokens: int | None) -> None:
        """Compute at most `max_tokens` prompt tokens in a step in which other sequences decode. None if there is no limit."""
        self._max_prompt_tokens = max_tokens

    def restrict(self, sequences: Collection[Sequence] | None) -> None:
        """Schedule only these sequences from now on, while a failed step is run again in parts. None schedules all."""
        self._only = sequences

    def schedule(self) -> Schedule:
        """The next step of the host executor: running sequences, then admitted ones, then room for drafts."""
        preempted: list[Sequence] = []
        rows: dict[Sequence, int] = {}
        budget = self.max_batched_tokens
        prompts = self._prompt_budget
        used = self._schedule_running(rows, budget, prompts, preempted)
        if not preempted and all(count == sequence.num_uncomputed for sequence, count in rows.items()):
            prompts -= sum(count for count in rows.values() if count > 1)
            self._admit(rows, min(budget - used, prompts))
        drafts = self._reserve_drafts(rows)
        items = tuple(Scheduled(sequence, count, drafts.get(sequence, 0)) for sequence, count in rows.items())
        return Schedule(items, tuple(preempted))

    def schedule_prompts(self, budget: int, can_join: Callable[[Sequence], bool]) -> tuple[Scheduled, ...]:
        """Prompt tokens for a step in which the other running sequences decode: first of running sequences for which `can_join`
        is true, then of waiting ones up to the first for which it is false. No sequence is preempted."""
        rows: dict[Sequence, int] = {}
        for sequence in self.running:
            if budget > 0 and can_join(sequence):
                count = self._chunk(sequence, budget)
                if not self.tables.grow(sequence.id, sequence.num_computed + count):
                    return ()
                rows[sequence] = count
                budget = budget - count if count == sequence.num_uncomputed else 0
        self._admit(rows, budget, can_join)
        return tuple(Scheduled(sequence, count, 0) for sequence, count in rows.items())

    @property
    def _prompt_budget(self) -> int:
        """Prompt tokens of the next step."""
        limit = self._max_prompt_tokens
        if limit is None or not any(sequence.num_uncomputed == 1 for sequence in self.running):
            return self.max_batched_tokens
        return min(limit, self.max_batched_tokens)

    def _schedule_running(self, rows: dict[Sequence, int], budget: int, prompts: int, preempted: list[Sequence]) -> int:
        used = 0
        num_behind = len(self.running)
        for sequence in list(self.running):
            if sequence.status is not Status.RUNNING:  # preempted in this call
                continue
            num_behind -= 1
            if self._only is not None and sequence not in self._only:
                continue
            # A long prompt leaves one token for each sequence behind it, so that none stalls.
            count, room = sequence.num_uncomputed, max(1, budget - used - num_behind)
            if count > 1:
                count = self._chunk(sequence, max(1, min(room, prompts)))
                prompts -= count
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
        """Free the blocks of a sequence; its tokens stay, and their KV is computed again after its next admission."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self.running.remove(sequence)
        self.tables.close(sequence.id)
        sequence.num_computed = 0
        sequence.status = Status.WAITING
        self.add(sequence)

    def _admit(
        self, rows: dict[Sequence, int], budget: int, can_join: Callable[[Sequence], bool] = lambda sequence: True
    ) -> None:
        taken = len(self.running)  # including places kept for sequences that join in the next step
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        for sequence in list(self.waiting):
            if budget <= 0 or taken >= self.max_num_seqs or not can_join(sequence):
                return
            if self._only is not None and sequence not in self._only:
                continue
            if self.tables.prefix_caching and _shares_prefill(sequence, prefilling):
                taken += 1  # no sequence of lower rank takes its place
                continue
            if self.tables.prefix_caching and self._waits_for_leader(sequence):
                continue
            if self.tiers is not None and not self.tiers.is_ready(sequence):
                continue
            free, most = self.tables.pool.num_free, self.max_num_seqs
            if self.running and not admits(self._needed(sequence, taken), free, taken, most):
                return
            if self._waits_for_room(sequence, budget, rows.values()):
                return
            sequence.num_computed = self.tables.open(sequence.id, sequence.cacheable_ids, sequence.cache_salt)
            if self.tiers is not None:
                sequence.num_computed += self.tiers.load(sequence)
            count = self._chunk(sequence, budget)
            if not self.tables.grow(sequence.id, sequence.num_computed + count):
                self.tables.close(sequence.id)
                sequence.num_computed = 0
                return
            self.waiting.remove(sequence)
            bisect.insort(self.running, sequence, key=_rank)
            sequence.status = Status.RUNNING
            if sequence.is_prefilling:
                prefilling.append(sequence)
            if not sequence.num_preemptions:  # after a preemption, a hit is its own earlier work
                sequence.num_cached = sequence.num_computed
            rows[sequence] = count
            budget = budget - count if count == sequence.num_uncomputed else 0
            taken += 1

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Prompt tokens of the sequence to compute now, at most `budget`."""
        return chunk_tokens(sequence.num_computed, sequence.num_uncomputed, budget, self._prompt_piece)

    def _waits_for_room(self, sequence: Sequence, budget: int, rows: Collection[int]) -> bool:
        """Whether a long prompt waits for one step, because it begins with whole pieces if the step computes no other prompt.
        `rows` are the rows of each sequence in the step."""
        if self._prompt_piece is None or sequence is self._held_back or all(count == 1 for count in rows):
            return False
        cached, _ = self.tables.find(sequence.cacheable_ids, sequence.cache_salt, sequence.id)
        num_cached = len(cached) * BLOCK_SIZE
        if not ends_inside_piece(num_cached, len(sequence.ids) - num_cached, budget, self._prompt_piece):
            return False
        self._held_back = sequence
        return True

    def _needed(self, sequence: Sequence, taken: int) -> int:
        """Blocks to admit the sequence: for its tokens, and one spare block for it and for every running sequence."""
        cached, _ = self.tables.find(sequence.cacheable_ids, sequence.cache_salt, sequence.id)
        return blocks_for(len(sequence.ids)) - len(cached) + self.tables.pool.num_unheld(cached) + 1 + taken

    @staticmethod
    def _waits_for_leader(sequence: Sequence) -> bool:
        """Whether the first choice of the same request still computes their common prompt."""
        leader = sequence.leader
        return leader is not None and leader.is_prefilling and not leader.is_finished

    def _reserve_drafts(self, rows: dict[Sequence, int]) -> dict[Sequence, int]:
        """Draft tokens by sequence, as far as the remaining budget and blocks allow."""
        budget = min(self.max_draft_tokens, self.max_batched_tokens - sum(rows.values()))
        drafts: dict[Sequence, int] = {}
        for sequence, count in rows.items():
            depth = sequence.depth if sequence.draft is None else len(sequence.draft)
            if depth == 0 or count != sequence.num_uncomputed:
                continue
            end = sequence.num_computed + count
            spare = self.tables.capacity(sequence.id) - end + self.tables.pool.num_free * BLOCK_SIZE
            draft = min(depth, budget, spare)
            if draft > 0:
                self.tables.grow(sequence.id, end + draft)
                drafts[sequence] = draft
                budget -= draft
        return drafts
