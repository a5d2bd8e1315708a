"""The proposer `layer_skip`: the first layers of the target draft. It needs no second model and no second cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from paceline.kv import BlockTables
from paceline.models.runner import ModelRunner, Span, early_exit
from paceline.speculation import Proposer, ProposerTraits, SequenceProgress
from paceline.speculation.distribution import pick, sample_draft
from paceline.speculation.drafts import DraftBatch, DraftProbs
from paceline.speculation.trees import draft_row

EXIT_SHARES = (0.25, 0.5, 0.75)
"""Shares of the target's layers after which exits are compared."""


class LayerSkipProposer:
    """Drafts a chain by an early exit of the target.

    The target's cache has the committed tokens, early layers included. Drafted tokens are written to the slots that the
    scheduler reserved for this round's draft. The verify pass writes every layer of those slots again before it reads them, so
    there is nothing to roll back.
    """

    def __init__(self, target: ModelRunner, tables: BlockTables, num_layers: int) -> None:
        """`tables` are the target's block tables."""
        self._target, self._tables = target, tables
        self._progress: dict[int, SequenceProgress] = {}
        self.exit_after(num_layers)

    def exit_after(self, num_layers: int) -> None:
        """Draft with the first `num_layers` layers from the next round on."""
        self._runner = early_exit(self._target, num_layers)
        self.traits = ProposerTraits(runners=(self._runner,), q_model=self._runner.model)

    @property
    def exit_layer(self) -> int:
        return self._runner.model.config.num_layers

    @property
    def num_target_layers(self) -> int:
        return self._target.model.config.num_layers

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self._progress.update((progress.sequence_id, progress) for progress in batch)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._progress.pop(sequence_id, None)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        limits = {i: self._limit(progress) for i in sequence_ids if (progress := self._progress.get(i))}
        drafts: dict[int, list[int]] = {i: [] for i, count in limits.items() if count > 0}
        probs: dict[int, list[Tensor]] = {}  # sequence -> q by step, for rejection sampling
        for step in range(max(limits.values(), default=0)):
            active = [self._progress[i] for i in drafts if limits[i] > step]
            spans = [self._span(progress, drafts[progress.sequence_id]) for progress in active]
            logits = self._runner.forward(spans).logits
            assert logits is not None
            for progress, token, q in _choose(logits, active, drafts):
                drafts[progress.sequence_id].append(token)
                if q is not None:
                    probs.setdefault(progress.sequence_id, []).append(q)
        return DraftBatch.chains(drafts.items(), _pack(drafts, probs))

    def _limit(self, progress: SequenceProgress) -> int:
        """Tokens that it may draft. Each pass writes a slot: of the newest committed token, then of each draft but the last."""
        if progress.depth == 0 or progress.sequence_id not in self._tables:
            return 0
        return max(0, min(progress.depth, self._tables.capacity(progress.sequence_id) - len(progress.ids)))

    def _span(self, progress: SequenceProgress, draft: Sequence[int]) -> Span:
        newest = draft[-1] if draft else progress.ids[-1]
        blocks = self._tables.blocks(progress.sequence_id)
        return Span(blocks, len(progress.ids) - 1 + len(draft), [newest], num_logits=1)


@contextmanager
def exits(proposer: Proposer) -> Iterator[Mapping[int, Callable[[], None]]]:
    """Yields the exits of a proposer that are worth comparing, as functions that choose each, by number of layers. Other
    proposers have no exits. At the end the proposer has the exit that it had before."""
    if not isinstance(proposer, LayerSkipProposer):
        yield {}
        return
    before, layers = proposer.exit_layer, proposer.num_target_layers
    counts = sorted({before, *(max(1, round(share * layers)) for share in EXIT_SHARES)})
    try:
        yield {count: partial(proposer.exit_after, count) for count in counts}
    finally:
        proposer.exit_after(before)


def _choose(
    logits: Tensor, active: Sequence[SequenceProgress], drafts: dict[int, list[int]]
) -> list[tuple[SequenceProgress, int, Tensor | None]]:
    """The next token of each sequence, and `q` for those under rejection sampling."""
    rows = [draft_row(progress, tuple(drafts[progress.sequence_id])) for progress in active]
    drawn = [i for i, p in enumerate(active) if p.verification == "rejection" and not p.sampling.is_greedy]
    picked = [i for i in range(len(active)) if i not in drawn]
    chosen: list[tuple[SequenceProgress, int, Tensor | None]] = []
    if picked:
        tokens = pick(logits[picked], [rows[i] for i in picked]).tolist()
        chosen.extend((active[i], token, None) for i, token in zip(picked, tokens, strict=True))
    if drawn:
        sample, q = sample_draft(logits[drawn], [rows[i] for i in drawn])
        chosen.extend((active[i], token, row) for i, token, row in zip(drawn, sample.tolist(), q, strict=True))
    return chosen


def _pack(drafts: dict[int, list[int]], probs: dict[int, list[Tensor]]) -> DraftProbs | None:
    if not probs:
        return None
    like = next(iter(probs.values()))[0]
    rows = []
    for sequence_id, tokens in drafts.items():
        if sequence_id in probs:
            rows.extend(probs[sequence_id])
        else:  # a coupled or greedy sequence in the same batch: one-hot
            index = torch.tensor(tokens, device=like.device)
            rows.extend(torch.nn.functional.one_hot(index, len(like)).to(like.dtype))
    return DraftProbs(torch.stack(rows))
