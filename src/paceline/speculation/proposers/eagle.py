"""An EAGLE head over the target's hidden states, and the tree it grows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.kernels.layout import BLOCK_SIZE
from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.models.cuda_graph import StreamTimer
from paceline.models.drafts.eagle import MAX_BRANCH, EagleRunner
from paceline.models.runner import Span
from paceline.speculation.drafts import DraftBatch, DraftCost, DraftPrefill
from paceline.speculation.proposer import Hidden, HiddenRequest, Progress, ProposerTraits
from paceline.speculation.proposers.pending import PendingStates
from paceline.speculation.trees.beams import Beams, Seat, choose
from paceline.speculation.trees.growth import Growth, tree_batch
from paceline.speculation.trees.ranking import RankRules, draft_row, rank
from paceline.speculation.trees.tree import MAX_NODES

BRANCHES = 8
"""Children of a node."""
WIDTH = 8
"""Nodes of a level that get children."""
LEVELS = 10
"""How long a path may get."""
BLIND_LEVELS = 7
"""How long where all levels are grown before anybody looks: few paths get longer, and every level costs."""
assert LEVELS <= MAX_BRANCH


@dataclass(slots=True)
class _Rider:
    """One sequence as the head sees it. Slots never seen (prefix hits, speculation switched off) leave no gap in the cache,
    only in the rotary positions: the head does not attend to them."""

    progress: Progress
    num_cached: int = 0
    next_slot: int = 0
    """Position after the last cached slot; `num_cached` unless slots were skipped."""

    @property
    def is_current(self) -> bool:
        """The last slot joins the state before the newest token with that token."""
        return self.next_slot == len(self.progress.ids) - 1


@dataclass(frozen=True, slots=True)
class _Work:
    """States of a rider that go into the cache: of `parts`, rows `rows[i]` of part i."""

    rider: _Rider
    parts: tuple[Hidden, ...]
    rows: tuple[slice, ...]

    @property
    def positions(self) -> list[int]:
        spans = zip(self.parts, self.rows, strict=True)
        return [part.start + i for part, rows in spans for i in range(rows.start, rows.stop)]


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """A sequence that somebody else drafts for a while: `num_cached` slots, and the state that goes into the next one."""

    num_cached: int
    state: Hidden


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node about to get children."""

    rider: int
    node: int
    parent_row: int
    """Row of its parent's state in the pass before."""


class EagleProposer:
    """Grows a tree of at most `depth` nodes, level by level, along the paths that are likeliest to be accepted, and stops
    where no further level can matter. Nothing is computed for a sequence until it is asked for drafts.

    A cached slot depends on the tokens up to the one after it. Blocks are therefore shared under the chain of tokens moved on
    by one, the first token being part of the salt.
    """

    def __init__(self, runner: EagleRunner, max_rows: int, prefix_caching: bool = True) -> None:
        self._runner = runner
        self._model = runner.model
        self._max_rows = max_rows
        self._tables = BlockTables(runner.num_blocks, prefix_caching)
        self._riders: dict[int, _Rider] = {}
        self._pending = PendingStates()
        self._prefill = DraftPrefill()
        """Draft prefill of the current call."""
        self._layers = runner.model.config.state_layers
        self.traits = ProposerTraits(
            hidden=HiddenRequest(layers=self._layers), is_tree=True, can_run_in_graph=True, runners=(runner,)
        )
        self.looks_once = runner.model.device.type == "cuda"
        """A GPU grows all levels before the host looks at any; on a CPU looking costs nothing and saves work."""

    @property
    def num_free_blocks(self) -> int:
        return self._tables.pool.num_free

    @property
    def runner(self) -> EagleRunner:
        return self._runner

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            self._riders.setdefault(progress.sequence_id, _Rider(progress)).progress = progress
            if progress.hidden is not None:
                self._pending.add(progress.sequence_id, progress.hidden, keep=progress.depth == 0)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._riders.pop(sequence_id, None)
            self._pending.close(sequence_id)
            self._tables.close(sequence_id)

    @torch.inference_mode()
    def lend(self, sequence_ids: Sequence[int]) -> tuple[dict[int, Loan], DraftPrefill]:
        """The sequences that can be brought up to date, for a drafter on the device until `take_back`, and what that cost."""
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i))]
        newest = {}
        for rider in riders:
            sequence_id = rider.progress.sequence_id
            if self._pending.end(sequence_id) == len(rider.progress.ids) - 1:
                part = self._pending.parts(sequence_id)[-1]
                inner = {layer: states[-1:].clone() for layer, states in part.inner.items()}
                newest[sequence_id] = Hidden(part.end - 1, inner, None)
        current, _ = self._catch_up([rider for rider in riders if rider.progress.sequence_id in newest])
        ids = [rider.progress.sequence_id for rider in current]
        loans = {i: Loan(rider.num_cached - 1, newest[i]) for i, rider in zip(ids, current, strict=True)}
        return loans, self._take_prefill()

    def blocks(self, sequence_id: int, num_slots: int) -> Sequence[int] | None:
        """Of a sequence that was lent, with room for `num_slots`; None: there is not so much."""
        return self._tables.blocks(sequence_id) if self._tables.grow(sequence_id, num_slots) else None

    @torch.inference_mode()
    def take_back(self, sequence_id: int, num_cached: int, fresh: Hidden) -> None:
        """Meanwhile the head has cached `num_cached` slots; the states of the committed tokens after them are `fresh`."""
        rider = self._riders.get(sequence_id)
        if rider is None or sequence_id not in self._tables:
            return
        rider.num_cached, rider.next_slot = num_cached, fresh.start
        self._pending.close(sequence_id)
        self._pending.add(sequence_id, fresh, keep=True)
        self._tables.shrink(sequence_id, num_cached)
        self._publish(rider)

    @torch.inference_mode()
    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        asked = [rider for i in sequence_ids if (rider := self._riders.get(i)) and rider.progress.depth > 0]
        riders, states = self._catch_up(asked[: self._runner.num_lanes])
        if not riders:
            return DraftBatch.empty(DraftCost(self._take_prefill()))
        grow = self._grow_blindly if self._is_blind(riders) else self._grow
        trees = grow(riders, states)
        drafts = [(rider.progress.sequence_id, tree) for rider, tree in zip(riders, trees, strict=True)]
        return tree_batch(drafts, DraftCost(self._take_prefill()))

    def _is_blind(self, riders: Sequence[_Rider]) -> bool:
        """Whether to grow without looking: on a GPU, unless penalties depend on what was grown."""
        return self.looks_once and not any(draft_row(rider.progress, ()).is_processed for rider in riders)

    def _grow(self, riders: Sequence[_Rider], states: Tensor) -> list[Growth]:
        """Level by level, only where it may matter."""
        trees = [Growth(_budget(rider), rider.progress.max_levels) for rider in riders]
        before = [_Branch(i, -1, i) for i in range(len(riders))]
        self._add_children(states, before, riders, trees)
        width = min(WIDTH, self._runner.num_lanes // len(riders))
        for level in range(1, LEVELS):
            row_of = {(branch.rider, branch.node): row for row, branch in enumerate(before)}
            branches = [
                _Branch(i, node, row_of[i, tree.parents[node]])
                for i, tree in enumerate(trees)
                for node in tree.frontier(level, width)
            ]
            if not branches:
                break
            states = self._advance(states, branches, riders, trees, level)
            self._add_children(states, branches, riders, trees)
            before = branches
        return trees

    def _grow_blindly(self, riders: Sequence[_Rider], states: Tensor) -> list[Growth]:
        """The same trees, but for paths over `BLIND_LEVELS`, read once."""
        budgets = [_budget(rider) for rider in riders]
        most = max(budgets)
        branches = min(BRANCHES, most, self._model.vocabulary.head.shape[0])
        width = max(1, min(WIDTH, branches, most - 1, self._runner.num_lanes // len(riders)))
        seats = [
            Seat(self._tables.blocks(r.progress.sequence_id), r.num_cached, len(r.progress.ids) - 2) for r in riders
        ]
        max_levels = [rider.progress.max_levels for rider in riders]
        deepest = min(most, max(BLIND_LEVELS if count is None else min(count, BLIND_LEVELS) for count in max_levels))
        rules = [self._rules(riders, level, width if level else 1, states) for level in range(deepest)]
        return choose(Beams(self._runner, seats, width, branches).grow(states, rules), budgets, max_levels)

    def _rules(self, riders: Sequence[_Rider], level: int, width: int, states: Tensor) -> RankRules:
        rows = [replace(row, position=row.position + level) for row in (draft_row(r.progress, ()) for r in riders)]
        coupled = [rider.progress.verification == "coupled" for rider in riders for _ in range(width)]
        like = states.new_empty(()).expand(len(coupled), self._model.vocabulary.head.shape[0])
        return RankRules.of([row for row in rows for _ in range(width)], coupled, self._model.vocabulary.ids, like)

    def _catch_up(self, riders: Sequence[_Rider]) -> tuple[list[_Rider], Tensor]:
        """Bring committed slots up to date, within a budget of rows per call. Who is, and the states of their last slots."""
        budget, works = self._max_rows, []
        for rider in riders:
            work = self._work(rider, budget) if budget > 0 else None
            if work is not None:
                works.append(work)
                budget -= len(work.positions)
        if not works:
            return [], torch.empty(0)
        inner = {
            layer: torch.cat(
                [part.inner[layer][rows] for w in works for part, rows in zip(w.parts, w.rows, strict=True)]
            )
            for layer in self._layers
        }
        spans, last_rows, count = [], [], 0
        for work in works:
            positions, ids = work.positions, work.rider.progress.ids
            blocks = self._tables.blocks(work.rider.progress.sequence_id)
            spans.append(Span(blocks, work.rider.num_cached, [ids[p + 1] for p in positions], 0, positions))
            count += len(positions)
            last_rows.append(count - 1)
        states = self._read(spans, self._model.fuse(inner))
        for work in works:
            self._advance_rider(work)
        done = [i for i, work in enumerate(works) if work.rider.is_current]
        return [works[i].rider for i in done], states[[last_rows[i] for i in done]]

    def _read(self, spans: Sequence[Span], states: Tensor) -> Tensor:
        """A pass over committed tokens. More of them than one round commits are a draft prefill."""
        rows = [len(span.tokens) for span in spans]
        missed = sum(count for count in rows if count > LEVELS + 1)
        if not missed:
            return self._runner.forward(spans, states)
        watch = StreamTimer(self._model.device)
        states = self._runner.forward(spans, states)
        self._prefill += DraftPrefill(missed, watch.seconds() * missed / sum(rows))
        return states

    def _take_prefill(self) -> DraftPrefill:
        taken, self._prefill = self._prefill, DraftPrefill()
        return taken

    def _work(self, rider: _Rider, budget: int) -> _Work | None:
        """The next states of `rider` to compute, at most `budget` rows; None where the newest is missing, or the cache has no
        room."""
        progress = rider.progress
        if self._pending.end(progress.sequence_id) != len(progress.ids) - 1:
            return None
        is_new = progress.sequence_id not in self._tables
        if is_new:
            # ids[1:]: see the class
            hit = self._tables.open(progress.sequence_id, progress.ids[1:], _salt(progress))
            rider.num_cached = rider.next_slot = hit
        parts, slices, taken = [], [], 0
        for part in self._pending.parts(progress.sequence_id):
            first = max(rider.next_slot - part.start, 0)
            last = min(part.end - part.start, first + budget - taken)
            if first < last:
                parts.append(part)
                slices.append(slice(first, last))
                taken += last - first
        if not taken or not self._tables.grow(progress.sequence_id, rider.num_cached + taken):
            return None
        if is_new:  # what its cache has, or the target had without computing it
            self._prefill += DraftPrefill(parts[0].start + slices[0].start)
        return _Work(rider, tuple(parts), tuple(slices))

    def _advance_rider(self, work: _Work) -> None:
        rider, positions = work.rider, work.positions
        full = rider.num_cached // BLOCK_SIZE
        rider.num_cached += len(positions)
        rider.next_slot = positions[-1] + 1
        self._pending.forget_before(rider.progress.sequence_id, rider.next_slot)
        if rider.num_cached // BLOCK_SIZE > full:
            self._publish(rider)

    def _publish(self, rider: _Rider) -> None:
        if rider.num_cached == rider.next_slot:
            progress = rider.progress
            self._tables.publish(progress.sequence_id, progress.ids[1:], rider.num_cached)

    def _add_children(
        self, states: Tensor, branches: Sequence[_Branch], riders: Sequence[_Rider], trees: Sequence[Growth]
    ) -> None:
        """Give every branch's node the tokens that likeliest follow it."""
        logits = self._model.logits(states)
        rows = [draft_row(riders[b.rider].progress, trees[b.rider].path(b.node)) for b in branches]
        coupled = [riders[b.rider].progress.verification == "coupled" for b in branches]
        most = min(BRANCHES, max(tree.budget for tree in trees))
        for branch, children in zip(branches, rank(logits, rows, coupled, self._model.vocabulary, most), strict=True):
            trees[branch.rider].add(branch.node, children)

    def _advance(
        self,
        states: Tensor,
        branches: Sequence[_Branch],
        riders: Sequence[_Rider],
        trees: Sequence[Growth],
        level: int,
    ) -> Tensor:
        """One slot for each branch, in a lane of its own: [len(branches), D]."""
        sources: list[int] = []
        targets: list[int] = []
        spans = []
        for number, branch in enumerate(branches):
            rider = riders[branch.rider]
            blocks = self._tables.blocks(rider.progress.sequence_id)
            full, lane = rider.num_cached // BLOCK_SIZE, self._runner.lane(number)
            behind = blocks[full:] if level == 1 else self._runner.lane(branch.parent_row)
            used = blocks_for(rider.num_cached - full * BLOCK_SIZE + level - 1)
            sources.extend(behind[:used])
            targets.extend(lane[:used])
            spans.append(
                Span(
                    blocks=[*blocks[:full], *lane],
                    context_len=rider.num_cached + level - 1,
                    tokens=[trees[branch.rider].tokens[branch.node]],
                    num_logits=0,
                    positions=[len(rider.progress.ids) - 2 + level],
                )
            )
        self._runner.copy(sources, targets)
        return self._runner.forward(spans, states[[branch.parent_row for branch in branches]])


def _budget(rider: _Rider) -> int:
    return min(rider.progress.depth, MAX_NODES)


def _salt(progress: Progress) -> str:
    return f"{progress.ids[0]}/{progress.cache_salt}"
