"""Chooses the sequences of the next step and the tokens scheduled for each."""

import bisect
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

from paceline.core.sequence import BLOCK_SIZE, Sequence, Status
from paceline.engine.step.step import Schedule, Scheduled
from paceline.engine.tiers import Tiers
from paceline.kv import BlockTables, blocks_for
from paceline.policy.prompt_line import PromptLine, rank
from paceline.policy.step import PromptClaim, PromptRoom, admits

MOST_CLAIMS = 16
"""Prompts in the line for which the size of pieces is decided."""


def _shares_prefill(sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
    """Whether this step computes a block of its prompt for a sequence of higher rank, so that the next step finds it cached."""
    ids, salt = sequence.cacheable_ids, sequence.cache_salt
    # The last token is always computed, so a prompt this short has no block that could be found in the cache.
    if len(ids) <= BLOCK_SIZE:
        return False
    for other in prefilling:
        if other.cache_salt != salt or rank(other) > rank(sequence):
            continue
        end = (other.num_computed // BLOCK_SIZE + 1) * BLOCK_SIZE
        if end < len(ids) and other.ids[:end] == ids[:end]:  # a hit leaves the last token to compute
            return True
    return False


@dataclass(slots=True)
class _Admission:
    """The admissions of one step."""

    taken: int
    """Sequences that run, and places kept for those that join in the next step."""
    is_closed: bool
    """Whether the step admits no further sequence."""


class Scheduler:
    """Continuous batching over a paged cache. Owns the queues, the block tables, and `num_computed` after preemption.

    Sequences that decode come first, with one token each. Then come prompts in the order of `PromptLine`, those that run and
    those that wait: several share a step, and short ones pass long ones. A waiting sequence is admitted when its prompt gets
    tokens. A sequence that needs a block when none is free preempts the running one of lowest rank, by priority and arrival.
    Drafts get only the remaining tokens and blocks: speculation never preempts, and no prompt waits for it.
    """

    def __init__(
        self,
        tables: BlockTables,
        max_num_seqs: int,
        max_batched_tokens: int,
        tiers: Tiers | None = None,
        max_draft_tokens: int | None = None,
    ) -> None:
        """`tiers` are the cache tiers below the device, None if there are none. `max_draft_tokens` limits the draft tokens of
        one step. If None, it equals `max_batched_tokens`."""
        self.tables = tables
        self.max_num_seqs = max_num_seqs
        self.max_batched_tokens = max_batched_tokens
        self.max_draft_tokens = max_batched_tokens if max_draft_tokens is None else max_draft_tokens
        self.running: list[Sequence] = []  # in rank order
        self.line = PromptLine[Sequence]()
        """The waiting sequences, and the order of all prompts."""
        self.num_preemptions = 0
        self.tiers = tiers
        self.barred: Sequence | None = None
        """The waiting sequence that came first in the newest call of `schedule_prompts` and could not join."""
        self._only: Collection[Sequence] | None = None
        self._room: PromptRoom | None = None

    @property
    def waiting(self) -> list[Sequence]:
        """In the order in which they are admitted if they have one tenant."""
        return list(self.line)

    @property
    def has_work(self) -> bool:
        return bool(self.running or len(self.line))

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens still to be computed, of all sequences. Safe from any thread."""
        return sum(s.num_uncomputed for s in (*self.waiting, *self.running) if s.num_uncomputed > 1)

    @property
    def may_admit(self) -> bool:
        """Whether the next step can admit a sequence: fewer than `max_num_seqs` run, and the first that waits for no tier
        finds blocks, those that running sequences hold in reserve included."""
        if len(self.running) >= self.max_num_seqs or not len(self.line):
            return False
        first = self.line.next
        if first is None or (self.tiers is not None and self.tiers.is_fetching(first)):
            tiers = self.tiers
            first = next((s for s in self.line if tiers is None or not tiers.is_fetching(s)), None)
        if first is None:
            return False
        need, free = self._needed(first, len(self.running)), self.tables.pool.num_free
        free = free if need <= free else free + self._num_idle
        return admits(need, free, len(self.running), self.max_num_seqs)

    def prompt_rows(self, excluded: Collection[int] = ()) -> int:
        """Prompt tokens that the next step would compute if its budget were large enough, without these sequences."""
        newcomers = islice(self.line, self.max_num_seqs - len(self.running)) if self.may_admit else ()
        prompts = [s for s in (*self.running, *newcomers) if s.id not in excluded]
        return sum([count for s in prompts if (count := s.num_uncomputed) > 1])

    def is_full(self, prompt_rows: int) -> bool:
        """Whether `prompt_rows` prompt rows take all the time or all tokens of the next step, so that none is left for
        drafts."""
        return prompt_rows >= min(self._next_room.rows, self.max_batched_tokens - len(self.running))

    @property
    def _num_idle(self) -> int:
        """Blocks that running sequences hold beyond their committed tokens."""
        return sum(max(0, len(self.tables.blocks(s.id)) - blocks_for(len(s.ids))) for s in self.running)

    @property
    def _num_promised(self) -> int:
        """Blocks that prompts which have begun need and do not hold yet."""
        return sum(
            max(0, blocks_for(len(s.ids)) - len(self.tables.blocks(s.id))) for s in self.running if s.is_prefilling
        )

    def claims(self, now: float) -> Iterator[PromptClaim]:
        """The first prompts of the line, for the pacer."""
        begun = sorted([s for s in self.running if s.is_prefilling], key=lambda s: s.num_uncomputed)
        waiting = islice(self.line, min(MOST_CLAIMS, self.max_num_seqs - len(self.running)))
        for sequence in heapq.merge(begun, waiting, key=lambda s: s.num_uncomputed):
            yield PromptClaim(sequence.num_uncomputed, sequence.num_computed, now - sequence.arrival)

    def add(self, sequence: Sequence) -> None:
        cached, _ = self.tables.find(sequence.cacheable_ids, sequence.cache_salt, sequence.id)
        rows = len(sequence.ids) - len(cached) * BLOCK_SIZE
        self.line.add(sequence, rows if sequence.leader is None else 1)  # the leader computes the prompt
        if self.tiers is not None:
            self.tiers.prefetch(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled sequence and free its blocks."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        self.line.discard(sequence)
        self.tables.close(sequence.id)
        if self.tiers is not None:
            self.tiers.cancel(sequence)
        sequence.status = Status.FINISHED

    def limit_prompts(self, room: PromptRoom | None) -> None:
        """Compute prompt tokens for at most this room in a step in which other sequences decode. None if there is no limit."""
        self._room = room

    def restrict(self, sequences: Collection[Sequence] | None) -> None:
        """Schedule only these sequences from now on, while a failed step is run again in parts. None schedules all."""
        self._only = sequences

    def schedule(self) -> Schedule:
        """The next step of the host executor: sequences that decode, then prompts, then room for drafts."""
        preempted: list[Sequence] = []
        rows: dict[Sequence, int] = {}
        running = [s for s in self.running if self._only is None or s in self._only]
        for sequence in running:
            if sequence.num_uncomputed == 1 and sequence.status is Status.RUNNING:
                self._extend(sequence, 1, rows, preempted)
        budget = self.max_batched_tokens - len(rows)
        prompts = [s for s in running if s.num_uncomputed > 1 and s.status is Status.RUNNING]
        self._share(rows, prompts, budget, preempted)
        drafts = self._reserve_drafts(rows)
        items = tuple(Scheduled(sequence, count, drafts.get(sequence, 0)) for sequence, count in rows.items())
        return Schedule(items, tuple(preempted))

    def schedule_prompts(self, budget: int, can_join: Callable[[Sequence], bool]) -> tuple[Scheduled, ...]:
        """Prompt tokens for a step in which the other running sequences decode: of running sequences for which `can_join` is
        true, and of waiting ones up to the first for which it is false. No sequence is preempted."""
        rows: dict[Sequence, int] = {}
        self.barred = None
        prompts = [sequence for sequence in self.running if can_join(sequence)]
        self._share(rows, prompts, budget, None, can_join)
        return tuple(Scheduled(sequence, count, 0) for sequence, count in rows.items())

    @property
    def _next_room(self) -> PromptRoom:
        """The room for prompts in the next step."""
        room = self._room
        if room is None or not any(sequence.num_uncomputed == 1 for sequence in self.running):
            return PromptRoom(self.max_batched_tokens)
        return room

    def _share(
        self,
        rows: dict[Sequence, int],
        begun: Seq[Sequence],
        budget: int,
        preempted: list[Sequence] | None,
        can_join: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> None:
        """Give the `budget` of rows to prompts that have begun and to waiting ones, as far as there is room. `preempted`
        receives the sequences that are preempted for them; if it is None, none is."""
        room = self._next_room
        left = room.rows
        admission = _Admission(len(self.running), is_closed=bool(preempted) or len(self.running) >= self.max_num_seqs)
        turns = self.line.turns(begun, min(budget, int(left)), may_begin=not admission.is_closed)
        while (turn := turns.next(min(budget, int(left)))) is not None:
            sequence = turn.prompt
            before = rows.get(sequence, 0)
            most = room.most(left, sequence.num_computed + before)
            if left == room.rows:  # the first prompt gets some, whatever they cost
                most = max(most, BLOCK_SIZE)
            most = min(turn.most, most)
            if sequence.status is Status.RUNNING:
                count = min(sequence.num_uncomputed, before + most)
                if preempted is not None:
                    self._extend(sequence, count, rows, preempted)
                    admission.is_closed = admission.is_closed or bool(preempted)
                elif self.tables.grow(sequence.id, sequence.num_computed + count):
                    rows[sequence] = count
            elif (self._only is None or sequence in self._only) and not self._admit(
                sequence, most, rows, admission, can_join
            ):
                admission.is_closed = not turns.refuse(turn)
            if admission.is_closed:
                turns.close()
            count = max(0, rows.get(sequence, 0) - before)
            is_whole = before + count == sequence.num_uncomputed
            turns.took(sequence, count, is_over=is_whole or count < turn.most)
            budget -= count
            left -= room.cost(count, sequence.num_computed + before)

    def _extend(self, sequence: Sequence, count: int, rows: dict[Sequence, int], preempted: list[Sequence]) -> None:
        """Schedule `count` tokens of a running sequence. Preempts sequences, perhaps this one, if blocks run out."""
        while not self.tables.grow(sequence.id, sequence.num_computed + count):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            rows.pop(victim, None)
            if victim is sequence:
                return
        rows[sequence] = count

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
        self,
        sequence: Sequence,
        most: int,
        rows: dict[Sequence, int],
        admission: "_Admission",
        can_join: Callable[[Sequence], bool],
    ) -> bool:
        """Admit a waiting sequence with up to `most` tokens, unless it has to wait. Returns False if the cache has no room for
        it."""
        if admission.taken >= self.max_num_seqs:
            admission.is_closed = True
            return True
        if not can_join(sequence):
            self.barred = sequence
            admission.is_closed = True
            return True
        if self.tables.prefix_caching and _shares_prefill(sequence, [s for s in rows if s.is_prefilling]):
            admission.taken += 1  # no sequence of lower rank takes its place
            return True
        if self.tables.prefix_caching and self._waits_for_leader(sequence):
            return True
        if self.tiers is not None and not self.tiers.is_ready(sequence):
            return True
        need, free = self._needed(sequence, admission.taken), self.tables.pool.num_free
        if self.running and not admits(need, free, admission.taken, self.max_num_seqs):
            return False
        sequence.num_computed = self.tables.open(sequence.id, sequence.cacheable_ids, sequence.cache_salt)
        if self.tiers is not None:
            sequence.num_computed += self.tiers.load(sequence)
        count = min(sequence.num_uncomputed, most)
        if not self.tables.grow(sequence.id, sequence.num_computed + count):
            self.tables.close(sequence.id)
            sequence.num_computed = 0
            return False
        self.line.begin(sequence)
        bisect.insort(self.running, sequence, key=rank)
        sequence.status = Status.RUNNING
        if not sequence.num_preemptions:  # after a preemption, a hit is its own earlier work
            sequence.num_cached = sequence.num_computed
        rows[sequence] = count
        admission.taken += 1
        return True

    def _needed(self, sequence: Sequence, taken: int) -> int:
        """Blocks to admit the sequence: for its tokens, for what prompts that have begun still need, and one spare block for it
        and for every running sequence."""
        cached, _ = self.tables.find(sequence.cacheable_ids, sequence.cache_salt, sequence.id)
        own = blocks_for(len(sequence.ids)) - len(cached) + self.tables.pool.num_unheld(cached)
        return own + self._num_promised + 1 + taken

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
