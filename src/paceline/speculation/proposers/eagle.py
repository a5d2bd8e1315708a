"""The proposer `eagle`: an EAGLE head drafts trees from the target's hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.eagle_head import MAX_TREE_SLOTS, EagleHead, TreeRoot
from paceline.kernels.gpu_model import uses_gpu_kernels
from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.models.cuda_graph import StreamTimer
from paceline.models.drafts.eagle import MAX_BRANCH, EagleRunner
from paceline.models.runner import Span, pass_rows
from paceline.speculation.drafts import DraftBatch, DraftCost, DraftPrefill, DraftTree
from paceline.speculation.proposer import Hidden, HiddenRequest, Progress, ProposerTraits
from paceline.speculation.proposers.draft_weights import DraftWeights
from paceline.speculation.proposers.pending_states import PendingStates
from paceline.speculation.trees.beams import Beams, CachedSequence, choose
from paceline.speculation.trees.growth import Growth
from paceline.speculation.trees.ranking import RankRules, draft_row, rank, tree_root
from paceline.speculation.trees.tree import MAX_NODES

BRANCHES = 8
"""Children of a node."""
WIDTH = 8
"""Nodes of a level that get children."""
LEVELS = 10
"""Maximal length of a path."""
DEVICE_LEVELS = 7
"""Maximal length of a path that grows on a GPU: all levels are computed there, and few paths get longer."""
assert LEVELS <= MAX_BRANCH


@dataclass(slots=True)
class _Sequence:
    """The state of one sequence. Tokens without hidden states (prefix hits, speculation off) leave no gap in the head's cache,
    only in the rotary positions: the head does not attend to them."""

    progress: Progress
    num_cached: int = 0
    next_slot: int = 0
    """Position after the last cached slot; `num_cached` unless slots were skipped."""
    is_shared: bool = True
    """Whether other sequences may use its cache: one set of weights has computed it."""

    @property
    def is_current(self) -> bool:
        """Whether the cache is up to date: the last slot combines the newest token with the state before it."""
        return self.next_slot == len(self.progress.ids) - 1


@dataclass(frozen=True, slots=True)
class _Update:
    """Hidden states to compute into the cache of a sequence: rows `rows[i]` of `parts[i]`."""

    sequence: _Sequence
    parts: tuple[Hidden, ...]
    rows: tuple[slice, ...]
    positions: Sequence[int]
    """Positions of the states."""

    @property
    def pieces(self) -> list[tuple[Mapping[int, Tensor], slice]]:
        return [(part.inner, rows) for part, rows in zip(self.parts, self.rows, strict=True)]

    @property
    def num_cached(self) -> int:
        """Cached slots of the sequence after it."""
        return self.sequence.num_cached + len(self.positions)

    @property
    def is_last(self) -> bool:
        """Whether the cache is up to date after it."""
        return self.positions[-1] + 2 == len(self.sequence.progress.ids)

    @property
    def is_prefill(self) -> bool:
        """Whether it has more tokens than one round commits."""
        return len(self.positions) > LEVELS + 1

    @property
    def is_processed(self) -> bool:
        """Whether the logits of its next token are modified before one is picked."""
        return draft_row(self.sequence.progress, ()).is_processed


@dataclass(frozen=True, slots=True, eq=False)
class GraphStart:
    """The state with which the graph executor takes over a sequence: cached slots, and the hidden state of the next one."""

    num_cached: int
    state: Hidden


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node about to get children."""

    sequence: int
    node: int
    parent_row: int
    """Row of its parent's state in the pass before."""


class EagleProposer:
    """Grows a tree of at most `depth` nodes level by level along the most probable paths, and stops when no further level can
    be in the draft. It computes nothing for a sequence before the first request for drafts.

    A cached slot depends on the tokens up to the one after it. The prefix keys of its blocks are therefore those of the tokens
    shifted by one; the first token is part of the salt.
    """

    def __init__(self, runner: EagleRunner, max_rows: int, prefix_caching: bool = True) -> None:
        self._runner = runner
        self._model = runner.model
        self._max_rows = max_rows
        self._tables = BlockTables(runner.num_blocks, prefix_caching)
        self._sequences: dict[int, _Sequence] = {}
        self._pending = PendingStates()
        self._prefill = DraftPrefill()
        """Draft prefill of the current call."""
        self._layers = runner.model.config.state_layers
        self._weights = DraftWeights(runner.model, self._stop_sharing)
        self.traits = ProposerTraits(
            hidden=HiddenRequest(layers=self._layers),
            is_tree=True,
            can_run_in_graph=True,
            runners=(runner,),
            weights=self._weights,
        )
        self.grows_on_device = uses_gpu_kernels(runner.model.device)
        """Whether all levels grow before the host reads any. On a CPU reading a level costs nothing and saves computation."""

    @property
    def num_free_blocks(self) -> int:
        return self._tables.pool.num_free

    @property
    def runner(self) -> EagleRunner:
        return self._runner

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            self._sequences.setdefault(progress.sequence_id, _Sequence(progress)).progress = progress
            if progress.hidden is not None:
                self._pending.add(progress.sequence_id, progress.hidden, keep=progress.depth == 0)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
            self._pending.close(sequence_id)
            self._tables.close(sequence_id)

    @torch.inference_mode()
    def begin_graph(self, sequence_ids: Sequence[int]) -> tuple[dict[int, GraphStart], DraftPrefill]:
        """Bring sequences up to date for the graph executor, which drafts for them until `end_graph`. Returns those that are,
        and the draft prefill."""
        sequences = [sequence for i in sequence_ids if (sequence := self._sequences.get(i))]
        newest = {}
        for sequence in sequences:
            sequence_id = sequence.progress.sequence_id
            if self._pending.end(sequence_id) == len(sequence.progress.ids) - 1:
                part = self._pending.parts(sequence_id)[-1]
                inner = {layer: states[-1:].clone() for layer, states in part.inner.items()}
                newest[sequence_id] = Hidden(part.end - 1, inner, None)
        ready = [sequence for sequence in sequences if sequence.progress.sequence_id in newest]
        current, _ = self._update_cache(self._next_updates(ready))
        ids = [sequence.progress.sequence_id for sequence in current]
        starts = {i: GraphStart(sequence.num_cached - 1, newest[i]) for i, sequence in zip(ids, current, strict=True)}
        return starts, self._take_prefill()

    def blocks(self, sequence_id: int, num_slots: int) -> Sequence[int] | None:
        """Blocks of a sequence that the graph executor drafts for, for `num_slots` slots; None: the cache is full."""
        return self._tables.blocks(sequence_id) if self._tables.grow(sequence_id, num_slots) else None

    @torch.inference_mode()
    def end_graph(self, sequence_id: int, num_cached: int, fresh: Hidden) -> None:
        """Take a sequence back. Its cache has `num_cached` slots; `fresh`: states of the committed tokens after them."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence_id not in self._tables:
            return
        sequence.num_cached, sequence.next_slot = num_cached, fresh.start
        self._pending.close(sequence_id)
        self._pending.add(sequence_id, fresh, keep=True)
        self._tables.shrink(sequence_id, num_cached)
        self._publish(sequence)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        drafting = [
            sequence for i in sequence_ids if (sequence := self._sequences.get(i)) and sequence.progress.depth > 0
        ]
        sequences, trees = self._draft(drafting[: self._runner.num_lanes])
        cost = DraftCost(self._take_prefill())
        if not sequences:
            return DraftBatch.empty(cost)
        return DraftBatch.trees(zip([one.progress.sequence_id for one in sequences], trees, strict=True), cost)

    def _draft(self, sequences: Sequence[_Sequence]) -> tuple[list[_Sequence], list[DraftTree]]:
        """Bring caches up to date and grow trees. Returns the sequences whose cache is up to date, and their trees."""
        head = None if self.grows_on_device else self._model.native(self._runner.cache)
        updates = self._next_updates(sequences)
        # Penalties depend on the grown tokens and need the host. A draft prefill is timed apart from the trees.
        if head is None or not updates or any(one.is_prefill or one.is_processed for one in updates):
            return self._draft_in_parts(head, updates)
        inner = self._runner.inner_rows([part for update in updates for part in update.pieces])
        rows = pass_rows([self._span(update) for update in updates])
        current = [(update, end - 1) for update, end in zip(updates, rows.starts[1:], strict=True) if update.is_last]
        done = [update.sequence for update, _ in current]
        grown: list[tuple[list[int], list[int]]] = []
        if current:
            roots = self._roots(done, [update.num_cached for update, _ in current])
            grown = head.draft(inner, rows, [row for _, row in current], *roots)
        else:
            head.forward(inner, rows)
        for update in updates:
            self._advance_sequence(update)
        return done, [DraftTree(tuple(tokens), tuple(parents)) for tokens, parents in grown]

    @torch.inference_mode()
    def _draft_in_parts(
        self, head: EagleHead | None, updates: Sequence[_Update]
    ) -> tuple[list[_Sequence], list[DraftTree]]:
        sequences, states = self._update_cache(updates)
        if not sequences:
            return [], []
        if any(draft_row(sequence.progress, ()).is_processed for sequence in sequences):
            grown = self._grow(sequences, states)
        elif self.grows_on_device:
            grown = self._grow_on_device(sequences, states)
        elif head is not None:
            drafts = head.grow(states, *self._roots(sequences, [one.num_cached for one in sequences]))
            return sequences, [DraftTree(tuple(tokens), tuple(parents)) for tokens, parents in drafts]
        else:
            grown = self._grow(sequences, states)
        return sequences, [tree.draft() for tree in grown]

    def _roots(self, sequences: Sequence[_Sequence], num_cached: Sequence[int]) -> tuple[list[TreeRoot], int, int]:
        """Roots, width and branches of native trees, which are those of `_grow`. `num_cached`: slots of each sequence."""
        width = min(WIDTH, self._runner.num_lanes // len(sequences))
        roots = []
        for number, (sequence, cached) in enumerate(zip(sequences, num_cached, strict=True)):
            progress = sequence.progress
            blocks = self._tables.blocks(progress.sequence_id)[: blocks_for(cached)]
            own = self._runner.lanes(number * width, width)[: blocks_for(MAX_TREE_SLOTS)]
            roots.append(tree_root(progress, [*blocks, *own], cached, LEVELS))
        return roots, width, min(BRANCHES, max(root.budget for root in roots))

    def _grow(self, sequences: Sequence[_Sequence], states: Tensor) -> list[Growth]:
        """Grow level by level; the host chooses the nodes that get children."""
        trees = [Growth(_budget(sequence), sequence.progress.max_levels) for sequence in sequences]
        before = [_Branch(i, -1, i) for i in range(len(sequences))]
        self._add_children(states, before, sequences, trees)
        width = min(WIDTH, self._runner.num_lanes // len(sequences))
        for level in range(1, LEVELS):
            row_of = {(branch.sequence, branch.node): row for row, branch in enumerate(before)}
            branches = [
                _Branch(i, node, row_of[i, tree.parents[node]])
                for i, tree in enumerate(trees)
                for node in tree.frontier(level, width)
            ]
            if not branches:
                break
            states = self._advance(states, branches, sequences, trees, level)
            self._add_children(states, branches, sequences, trees)
            before = branches
        return trees

    def _grow_on_device(self, sequences: Sequence[_Sequence], states: Tensor) -> list[Growth]:
        """The same trees up to `DEVICE_LEVELS`; the host reads them once."""
        budgets = [_budget(sequence) for sequence in sequences]
        most = max(budgets)
        branches = min(BRANCHES, most, self._model.vocabulary.head.shape[0])
        width = max(1, min(WIDTH, branches, most - 1, self._runner.num_lanes // len(sequences)))
        cached = [
            CachedSequence(self._tables.blocks(r.progress.sequence_id), r.num_cached, len(r.progress.ids) - 2)
            for r in sequences
        ]
        max_levels = [sequence.progress.max_levels for sequence in sequences]
        deepest = min(most, max(DEVICE_LEVELS if count is None else min(count, DEVICE_LEVELS) for count in max_levels))
        rules = [self._rules(sequences, level, width if level else 1, states) for level in range(deepest)]
        return choose(Beams(self._runner, cached, width, branches).grow(states, rules), budgets, max_levels)

    def _rules(self, sequences: Sequence[_Sequence], level: int, width: int, states: Tensor) -> RankRules:
        rows = [replace(row, position=row.position + level) for row in (draft_row(r.progress, ()) for r in sequences)]
        coupled = [sequence.progress.verification == "coupled" for sequence in sequences for _ in range(width)]
        like = states.new_empty(()).expand(len(coupled), self._model.vocabulary.head.shape[0])
        return RankRules.of([row for row in rows for _ in range(width)], coupled, self._model.vocabulary.ids, like)

    def _next_updates(self, sequences: Sequence[_Sequence]) -> list[_Update]:
        """Committed tokens to compute, within a budget of rows per call."""
        budget, updates = self._max_rows, []
        for sequence in sequences:
            update = self._next_update(sequence, budget) if budget > 0 else None
            if update is not None:
                updates.append(update)
                budget -= len(update.positions)
        return updates

    def _update_cache(self, updates: Sequence[_Update]) -> tuple[list[_Sequence], Tensor]:
        """Compute committed tokens. Returns the sequences whose cache is up to date, and the states of their last slots."""
        if not updates:
            return [], torch.empty(0)
        pieces = [piece for update in updates for piece in update.pieces]
        inner = {layer: _joined([states[layer][rows] for states, rows in pieces]) for layer in self._layers}
        last_rows, count = [], 0
        for update in updates:
            count += len(update.positions)
            last_rows.append(count - 1)
        states = self._forward([self._span(update) for update in updates], inner)
        for update in updates:
            self._advance_sequence(update)
        done = [i for i, update in enumerate(updates) if update.sequence.is_current]
        newest = [states[last_rows[i] : last_rows[i] + 1] for i in done]
        return [updates[i].sequence for i in done], _joined(newest) if done else states[:0]

    def _span(self, update: _Update) -> Span:
        sequence, positions = update.sequence, update.positions
        blocks, ids = self._tables.blocks(sequence.progress.sequence_id), sequence.progress.ids
        return Span(blocks, sequence.num_cached, [ids[p + 1] for p in positions], 0, positions)

    def _forward(self, spans: Sequence[Span], inner: Mapping[int, Tensor]) -> Tensor:
        """A pass over committed tokens. More of them than one round commits are a draft prefill."""
        rows = [len(span.tokens) for span in spans]
        num_prefill = sum(count for count in rows if count > LEVELS + 1)
        if not num_prefill:
            return self._runner.forward(spans, inner)
        timer = StreamTimer(self._model.device)
        states = self._runner.forward(spans, inner)
        self._prefill += DraftPrefill(num_prefill, timer.seconds() * num_prefill / sum(rows))
        return states

    def _take_prefill(self) -> DraftPrefill:
        taken, self._prefill = self._prefill, DraftPrefill()
        return taken

    def _next_update(self, sequence: _Sequence, budget: int) -> _Update | None:
        """The next states to compute, at most `budget` rows; None if the newest state is missing or the cache is full."""
        progress = sequence.progress
        if self._pending.end(progress.sequence_id) != len(progress.ids) - 1:
            return None
        is_new = progress.sequence_id not in self._tables
        if is_new:
            # ids[1:]: keys are shifted by one, see the class
            hit = self._tables.open(progress.sequence_id, progress.ids[1:], self._salt(progress))
            sequence.num_cached = sequence.next_slot = hit
        parts, slices, positions, taken = [], [], list[int](), 0
        for part in self._pending.parts(progress.sequence_id):
            first = max(sequence.next_slot - part.start, 0)
            last = min(part.end - part.start, first + budget - taken)
            if first < last:
                parts.append(part)
                slices.append(slice(first, last))
                positions.extend(range(part.start + first, part.start + last))
                taken += last - first
        if not taken or not self._tables.grow(progress.sequence_id, sequence.num_cached + taken):
            return None
        if is_new:  # tokens in the cache, and tokens without hidden states
            self._prefill += DraftPrefill(parts[0].start + slices[0].start)
        return _Update(sequence, tuple(parts), tuple(slices), positions)

    def _advance_sequence(self, update: _Update) -> None:
        sequence, positions = update.sequence, update.positions
        full = sequence.num_cached // BLOCK_SIZE
        sequence.num_cached += len(positions)
        sequence.next_slot = positions[-1] + 1
        self._pending.forget_before(sequence.progress.sequence_id, sequence.next_slot)
        if sequence.num_cached // BLOCK_SIZE > full:
            self._publish(sequence)

    def _salt(self, progress: Progress) -> str:
        return self._weights.salt(f"{progress.ids[0]}/{progress.cache_salt}")

    def _stop_sharing(self) -> None:
        """The weights were exchanged: the open sequences continue a cache of the other weights."""
        for sequence in self._sequences.values():
            sequence.is_shared = False

    def _publish(self, sequence: _Sequence) -> None:
        if sequence.is_shared and sequence.num_cached == sequence.next_slot:
            progress = sequence.progress
            self._tables.publish(progress.sequence_id, progress.ids[1:], sequence.num_cached)

    def _add_children(
        self, states: Tensor, branches: Sequence[_Branch], sequences: Sequence[_Sequence], trees: Sequence[Growth]
    ) -> None:
        """Add the most probable children to the node of every branch."""
        logits = self._model.logits(states)
        rows = [draft_row(sequences[b.sequence].progress, trees[b.sequence].path(b.node)) for b in branches]
        coupled = [sequences[b.sequence].progress.verification == "coupled" for b in branches]
        most = min(BRANCHES, max(tree.budget for tree in trees))
        for branch, children in zip(branches, rank(logits, rows, coupled, self._model.vocabulary, most), strict=True):
            trees[branch.sequence].add(branch.node, children)

    def _advance(
        self,
        states: Tensor,
        branches: Sequence[_Branch],
        sequences: Sequence[_Sequence],
        trees: Sequence[Growth],
        level: int,
    ) -> Tensor:
        """Compute one slot for each branch, in its own lane: [len(branches), D]."""
        sources: list[int] = []
        targets: list[int] = []
        spans = []
        for number, branch in enumerate(branches):
            sequence = sequences[branch.sequence]
            blocks = self._tables.blocks(sequence.progress.sequence_id)
            full, lane = sequence.num_cached // BLOCK_SIZE, self._runner.lane(number)
            behind = blocks[full:] if level == 1 else self._runner.lane(branch.parent_row)
            used = blocks_for(sequence.num_cached - full * BLOCK_SIZE + level - 1)
            sources.extend(behind[:used])
            targets.extend(lane[:used])
            spans.append(
                Span(
                    blocks=[*blocks[:full], *lane],
                    context_len=sequence.num_cached + level - 1,
                    tokens=[trees[branch.sequence].tokens[branch.node]],
                    num_logits=0,
                    positions=[len(sequence.progress.ids) - 2 + level],
                )
            )
        self._runner.copy(sources, targets)
        return self._runner.forward(spans, states[[branch.parent_row for branch in branches]])


def _budget(sequence: _Sequence) -> int:
    return min(sequence.progress.depth, MAX_NODES)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
