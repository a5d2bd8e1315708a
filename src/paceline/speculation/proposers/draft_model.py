"""A second, smaller model of the same vocabulary rides in front."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.models.architectures.decoder import ForwardOutput
from paceline.models.cuda_graph import StreamTimer
from paceline.models.runner import ModelRunner, Span
from paceline.speculation.drafts import DraftBatch, DraftCost, DraftPrefill, DraftProbs
from paceline.speculation.proposer import Progress, ProposerTraits
from paceline.speculation.verification.distribution import pick, sample_draft
from paceline.speculation.verification.rows import RowContext

LONG_GAP = 16
"""Tokens that a draft is behind by more than which it was left behind, and not only overtaken by a round or a lookup."""


@dataclass(slots=True)
class _Rider:
    """One sequence as the draft model sees it."""

    progress: Progress
    cached: list[int] = field(default_factory=list)
    """Tokens whose keys and values are in the draft's cache, drafted ones included."""
    draft: list[int] = field(default_factory=list)

    def rewind(self) -> None:
        """Keep of the cache what was committed. The newest token is computed again at the least: its logits are wanted."""
        ids, cached = self.progress.ids, self.cached
        keep = min(len(cached), len(ids) - 1)
        start = max(0, keep - len(self.draft) - 1)  # everything before the last round's drafts was committed already
        while start < keep and cached[start] == ids[start]:
            start += 1
        del cached[start:]
        self.draft = []

    def context(self, step: int) -> RowContext:
        """Of the row that predicts drafted token number `step`."""
        progress = self.progress
        return RowContext(
            params=progress.sampling,
            seed=progress.seed,
            choice=progress.choice,
            position=len(progress.ids) + step,
            ids=progress.ids,
            num_prompt=progress.num_prompt,
            path=tuple(self.draft[:step]),
        )


class DraftModelProposer:
    """Drafts a chain with a model of its own cache, sized once at the start: a sequence that finds no room there, or has
    outgrown the draft's window, goes undrafted.

    Nothing is computed for a sequence until it is asked for drafts, so a sequence that never speculates costs nothing here.
    With coupled verification the draft picks with the target's own noise; with rejection it samples from `q` and says so.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        num_proposable: int,
        vocab_size: int,
        prefix_caching: bool = True,
        max_gap: int | None = None,
    ) -> None:
        """`num_proposable`: token ids below this are known to both models; `vocab_size` is the target's. `max_gap`: tokens that
        the draft may catch up with in a step, `max_rows` at a time; as many as in one pass if None."""
        self._runner = runner
        self._max_rows = max_rows
        self._max_gap = max_gap or max_rows
        self._num_proposable = num_proposable
        self._vocab_size = vocab_size
        self._tables = BlockTables(runner.num_blocks, prefix_caching)
        self._riders: dict[int, _Rider] = {}
        self.traits = ProposerTraits(is_lazy=True, can_run_in_graph=True, runners=(runner,), q_model=runner.model)

    @property
    def num_free_blocks(self) -> int:
        return self._tables.pool.num_free

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            rider = self._riders.get(progress.sequence_id)
            if rider is None:
                self._riders[progress.sequence_id] = _Rider(progress)
                continue
            rider.progress = progress
            rider.rewind()
            if progress.sequence_id in self._tables:
                self._tables.shrink(progress.sequence_id, len(rider.cached))

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        asked = [rider for i in sequence_ids if (rider := self._riders.get(i)) and rider.progress.depth > 0]
        riders, prefill = self._catch_up([rider for rider in asked if self._in_window(rider)])
        if not riders:
            return DraftBatch.empty(DraftCost(prefill))
        probs: dict[tuple[int, int], Tensor] = {}  # (sequence, step) -> q
        active = riders
        logits = self._logits([(rider, rider.progress.ids[len(rider.cached) :]) for rider in active], committed=True)
        for step in range(max(rider.progress.depth for rider in riders)):
            self._choose(logits, active, step, probs)
            active = [rider for rider in active if rider.progress.depth > step + 1]
            if active:
                logits = self._logits([(rider, rider.draft[-1:]) for rider in active], committed=False)
        return DraftBatch.chains(
            [(rider.progress.sequence_id, rider.draft) for rider in riders],
            self._pack(riders, probs),
            DraftCost(prefill),
        )

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._riders.pop(sequence_id, None)
            self._tables.close(sequence_id)

    def __contains__(self, sequence_id: int) -> bool:
        """Whether it has heard of the sequence."""
        return sequence_id in self._riders

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def num_proposable(self) -> int:
        return self._num_proposable

    def catch_up(self, sequence_ids: Sequence[int]) -> DraftPrefill:
        """Compute what the draft has missed of these, within the limit of a step, and return what that cost."""
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i))]
        return self._catch_up([rider for rider in riders if self._in_window(rider)])[1]

    def lend(self, sequence_id: int, num_tokens: int) -> Sequence[int] | None:
        """Blocks for `num_tokens` of a sequence that somebody else drafts for a while, on the device; None where the draft is
        not up to date with it or has no room. `take_back` ends it."""
        if sequence_id not in self._riders or sequence_id not in self._tables or not self._reaches(num_tokens):
            return None
        return self._tables.blocks(sequence_id) if self._tables.grow(sequence_id, num_tokens) else None

    def has_room(self, sequence_id: int, num_tokens: int) -> bool:
        """Whether so many tokens of the sequence fit into the draft's window and its cache."""
        held = len(self._tables.blocks(sequence_id)) if sequence_id in self._tables else 0
        return self._reaches(num_tokens) and blocks_for(num_tokens) - held <= self.num_free_blocks

    def is_current(self, sequence_id: int) -> bool:
        """Whether at most two tokens of the sequence are still to be computed here."""
        rider = self._riders.get(sequence_id)
        return rider is not None and sequence_id in self._tables and len(rider.cached) >= len(rider.progress.ids) - 2

    def take_back(self, sequence_id: int, num_computed: int) -> None:
        """The first `num_computed` committed tokens were computed meanwhile."""
        rider = self._riders.get(sequence_id)
        if rider is not None and sequence_id in self._tables:
            rider.cached, rider.draft = list(rider.progress.ids[:num_computed]), []
            self._tables.shrink(sequence_id, num_computed)
            self._tables.publish(sequence_id, rider.progress.ids, num_computed)

    def _in_window(self, rider: _Rider) -> bool:
        drafted = len(rider.progress.ids) + rider.progress.depth
        return self._reaches(drafted - 1)  # the last one is not computed

    def _reaches(self, num_tokens: int) -> bool:
        """A draft may have been made for shorter texts than its target: it has no rotary angles past its window."""
        return num_tokens <= self._runner.model.config.max_position

    def _catch_up(self, riders: list[_Rider]) -> tuple[list[_Rider], DraftPrefill]:
        """Riders ready to draft, and the draft prefill: long gaps, such as prompts, are computed within a budget of rows."""
        ready, budget, room = [], self._max_gap, self._max_rows
        rows = missed = hits = 0
        watch = StreamTimer(self._runner.device)
        work: list[tuple[_Rider, Sequence[int]]] = []  # of the next pass
        for rider in riders:
            progress, ids = rider.progress, rider.progress.ids
            if progress.sequence_id not in self._tables:
                hit = self._tables.open(progress.sequence_id, ids, progress.cache_salt)
                rider.cached = list(ids[:hit])
                hits += hit
            if not self._tables.grow(progress.sequence_id, len(ids) + progress.depth):
                continue
            gap = len(ids) - 1 - len(rider.cached)
            is_long = gap > LONG_GAP
            while gap > 1 and budget > 0:  # one missing token is the usual case after a full acceptance
                start, count = len(rider.cached), min(gap, budget, room)
                work.append((rider, ids[start : start + count]))
                gap, budget, room = gap - count, budget - count, room - count
                rows, missed = rows + count, missed + count * is_long
                if room == 0:
                    self._forward(work, num_logits=0, committed=True)
                    work, room = [], self._max_rows
            if gap <= 1:
                ready.append(rider)
        if work:
            self._forward(work, num_logits=0, committed=True)
        seconds = watch.seconds() * missed / rows if missed else 0.0
        return ready, DraftPrefill(hits + missed, seconds)

    def _logits(self, work: Sequence[tuple[_Rider, Sequence[int]]], committed: bool) -> Tensor:
        """[len(work), V] over the target's vocabulary: tokens that the draft does not have are impossible."""
        logits = self._forward(work, num_logits=1, committed=committed).logits
        assert logits is not None
        logits = logits[:, : self._num_proposable]
        missing = self._vocab_size - self._num_proposable
        return pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def _forward(self, work: Sequence[tuple[_Rider, Sequence[int]]], num_logits: int, committed: bool) -> ForwardOutput:
        spans = [
            Span(self._tables.blocks(rider.progress.sequence_id), len(rider.cached), self._known(tokens), num_logits)
            for rider, tokens in work
        ]
        output = self._runner.forward(spans)
        for rider, tokens in work:
            rider.cached.extend(tokens)
            if committed:
                self._tables.publish(rider.progress.sequence_id, rider.progress.ids, len(rider.cached))
        return output

    def _known(self, tokens: Sequence[int]) -> Sequence[int]:
        """A committed token may lie past the draft's embeddings. Any other stands in for it: a draft is a guess."""
        return [token if token < self._num_proposable else 0 for token in tokens]

    def _choose(self, logits: Tensor, riders: list[_Rider], step: int, probs: dict[tuple[int, int], Tensor]) -> None:
        """Append the next token to every rider's draft, and note `q` where verification will ask for it."""
        rows = [rider.context(step) for rider in riders]
        tokens = [0] * len(riders)
        by_pick = [i for i, rider in enumerate(riders) if not self._wants_q(rider)]
        if by_pick:
            for i, token in zip(by_pick, pick(logits[by_pick], [rows[i] for i in by_pick]).tolist(), strict=True):
                tokens[i] = token
        by_draw = [i for i, rider in enumerate(riders) if self._wants_q(rider)]
        if by_draw:
            drawn, q = sample_draft(logits[by_draw], [rows[i] for i in by_draw])
            for i, token, distribution in zip(by_draw, drawn.tolist(), q, strict=True):
                tokens[i] = token
                probs[riders[i].progress.sequence_id, step] = distribution
        for rider, token in zip(riders, tokens, strict=True):
            rider.draft.append(token)

    @staticmethod
    def _wants_q(rider: _Rider) -> bool:
        return rider.progress.verification == "rejection" and not rider.progress.sampling.is_greedy

    def _pack(self, riders: list[_Rider], probs: dict[tuple[int, int], Tensor]) -> DraftProbs | None:
        if not probs:
            return None
        rows = []
        for rider in riders:
            for step, token in enumerate(rider.draft):
                q = probs.get((rider.progress.sequence_id, step))
                if q is None:  # coupled or greedy beside it in the batch: one-hot
                    q = torch.zeros(self._vocab_size, device=self._runner.device)
                    q[token] = 1.0
                rows.append(q)
        return DraftProbs(torch.stack(rows))
