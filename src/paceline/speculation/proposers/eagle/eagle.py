"""The proposer `eagle`: an EAGLE head drafts trees from the target's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.core.traffic import TrafficClass
from paceline.kernels.cpu.eagle_head import EagleHead
from paceline.kernels.formats.layout import uses_gpu_kernels
from paceline.models.heads.eagle import EagleRunner
from paceline.models.runner import pass_rows
from paceline.speculation import HiddenRequest, HiddenRows, ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftCost, DraftPrefill, DraftTree
from paceline.speculation.proposers.eagle.eagle_cache import CacheUpdate, EagleCache, EagleSequence
from paceline.speculation.proposers.eagle.eagle_trees import EagleTrees, TreeStart
from paceline.speculation.trees import draft_row

Drafted = tuple[list[EagleSequence], list[DraftTree]]
"""Sequences whose cache is up to date, and their trees."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphStart:
    """The state with which the graph executor takes over a sequence: cached slots, and the hidden state of the next one."""

    num_cached: int
    state: HiddenRows


class EagleProposer:
    """Grows a tree of at most `depth` nodes level by level along the most probable paths, and stops when no further level can
    be in the draft. It computes nothing for a sequence before the first request for drafts."""

    def __init__(self, runner: EagleRunner, max_rows: int, prefix_caching: bool = True) -> None:
        self._runner = runner
        self._model = runner.model
        self._cache = EagleCache(runner, max_rows, prefix_caching)
        self._trees = EagleTrees(runner)
        self.traits = ProposerTraits(
            hidden=HiddenRequest(layers=runner.model.config.state_layers),
            is_tree=True,
            can_run_in_graph=True,
            runners=(runner,),
            weights=self._cache.weights,
            traffic_class=self._traffic_class,
        )
        self.grows_on_device = uses_gpu_kernels(runner.model.device)
        """Whether all levels grow before the host reads any. On a CPU reading a level costs nothing and saves computation."""

    @property
    def num_free_blocks(self) -> int:
        return self._cache.tables.pool.num_free

    @property
    def runner(self) -> EagleRunner:
        return self._runner

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            self._cache.observe(progress)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._cache.close(sequence_id)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        drafting = [sequence for sequence in self._known(sequence_ids) if sequence.progress.depth > 0]
        sequences, trees = self._draft(drafting[: self._runner.num_lanes])
        cost = DraftCost(self._cache.take_prefill())
        if not sequences:
            return DraftBatch.empty(cost)
        return DraftBatch.trees(
            zip([sequence.progress.sequence_id for sequence in sequences], trees, strict=True), cost
        )

    @torch.inference_mode()
    def begin_graph(self, sequence_ids: Sequence[int]) -> tuple[dict[int, GraphStart], DraftPrefill]:
        """Bring sequences up to date for the graph executor, which drafts for them until `end_graph`. Returns those that are,
        and the draft prefill."""
        newest, ready = {}, []
        for sequence in self._known(sequence_ids):
            state = self._cache.newest_state(sequence)
            if state is not None:
                newest[sequence.progress.sequence_id] = state
                ready.append(sequence)
        starts = {}
        while updates := self._cache.next_updates(ready):  # a call computes a limited number of rows
            for sequence in self._cache.update(updates)[0]:
                i = sequence.progress.sequence_id
                starts[i] = GraphStart(sequence.num_cached - 1, newest[i])
            ready = [sequence for sequence in ready if sequence.progress.sequence_id not in starts]
        return starts, self._cache.take_prefill()

    def blocks(self, sequence_id: int, num_slots: int) -> Sequence[int] | None:
        """Blocks of a sequence that the graph executor drafts for, for `num_slots` slots. None if the cache is full."""
        tables = self._cache.tables
        return tables.blocks(sequence_id) if tables.grow(sequence_id, num_slots) else None

    @torch.inference_mode()
    def end_graph(self, sequence_id: int, num_cached: int, fresh: HiddenRows) -> None:
        """Take a sequence back. Its cache has `num_cached` slots, and `fresh` are the states of the committed tokens after
        them."""
        self._cache.resume(sequence_id, num_cached, fresh)

    def _traffic_class(self, traffic: TrafficClass, sequence_id: int) -> TrafficClass:
        """The class of a sequence. Drafts for a prompt without states are worse."""
        sequence = self._cache.sequences.get(sequence_id)
        return traffic._replace(is_partial=True) if sequence is not None and sequence.is_partial else traffic

    def _known(self, sequence_ids: Sequence[int]) -> list[EagleSequence]:
        return [sequence for i in sequence_ids if (sequence := self._cache.sequences.get(i))]

    def _draft(self, sequences: Sequence[EagleSequence]) -> Drafted:
        """Bring caches up to date and grow trees."""
        head = None if self.grows_on_device else self._model.native(self._runner.cache)
        updates = self._cache.next_updates(sequences)
        # Penalties depend on the grown tokens and need the host. A draft prefill is timed apart from the trees.
        in_parts = head is None or not head.has_plain_states
        if head is None or in_parts or not updates or any(u.is_prefill or u.is_processed for u in updates):
            return self._draft_in_parts(head, updates)
        return self._draft_natively(head, updates)

    def _draft_natively(self, head: EagleHead, updates: Sequence[CacheUpdate]) -> Drafted:
        """In one native call."""
        inner = self._runner.inner_rows([part for update in updates for part in update.pieces])
        rows = pass_rows([self._cache.span(update) for update in updates])
        current = [(update, end - 1) for update, end in zip(updates, rows.starts[1:], strict=True) if update.is_last]
        done = [update.sequence for update, _ in current]
        grown: list[tuple[list[int], list[int]]] = []
        if current:
            starts = [self._start(update.sequence, update.num_cached) for update, _ in current]
            grown = head.draft(inner, rows, [row for _, row in current], *self._trees.roots(starts))
        else:
            head.forward(inner, rows)
        self._cache.advance(updates)
        return done, _native_trees(grown)

    @torch.inference_mode()
    def _draft_in_parts(self, head: EagleHead | None, updates: Sequence[CacheUpdate]) -> Drafted:
        """First the caches, then the trees."""
        sequences, states = self._cache.update(updates)
        if not sequences:
            return [], []
        starts = [self._start(sequence, sequence.num_cached) for sequence in sequences]
        is_processed = any(draft_row(sequence.progress, ()).is_processed for sequence in sequences)
        if head is not None and not is_processed:
            return sequences, _native_trees(head.grow(states, *self._trees.roots(starts)))
        if self.grows_on_device and not is_processed:
            grown = self._trees.grow_on_device(starts, states)
        else:
            grown = self._trees.grow(starts, states)
        return sequences, [tree.draft() for tree in grown]

    def _start(self, sequence: EagleSequence, num_cached: int) -> TreeStart:
        progress = sequence.progress
        return TreeStart(progress, self._cache.tables.blocks(progress.sequence_id), num_cached)


def _native_trees(grown: Sequence[tuple[list[int], list[int]]]) -> list[DraftTree]:
    return [DraftTree(tuple(tokens), tuple(parents)) for tokens, parents in grown]
