"""Self-speculation: the target's first layers draft for all of them. No second model, no second cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kv.block_tables import BlockTables
from paceline.models.runner import ModelRunner, Span
from paceline.models.runners import early_exit
from paceline.speculation.drafts import DraftBatch, DraftProbs
from paceline.speculation.proposer import Progress, ProposerTraits
from paceline.speculation.trees.ranking import draft_row
from paceline.speculation.verification.distribution import pick, sample_draft


class LayerSkipProposer:
    """Drafts a chain by an early exit of the target.

    Committed tokens are in the target's cache already, early layers included. Drafted ones are written to the slots that the
    scheduler reserved for this round's draft, where the verify pass computes every layer again before it looks; so nothing of
    a draft is ever read by the target, and there is nothing to roll back.
    """

    def __init__(self, target: ModelRunner, tables: BlockTables, num_layers: int) -> None:
        """`tables` are the target's: who may write where."""
        self._runner = early_exit(target, num_layers)
        self._tables = tables
        self._progress: dict[int, Progress] = {}
        self.traits = ProposerTraits(runners=(self._runner,), q_model=self._runner.model)

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def observe(self, batch: Sequence[Progress]) -> None:
        self._progress.update((progress.sequence_id, progress) for progress in batch)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._progress.pop(sequence_id, None)

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        room = {i: self._room(progress) for i in sequence_ids if (progress := self._progress.get(i))}
        drafts: dict[int, list[int]] = {i: [] for i, count in room.items() if count > 0}
        laws: dict[int, list[Tensor]] = {}  # q by step, where verification will ask for it
        for step in range(max(room.values(), default=0)):
            active = [self._progress[i] for i in drafts if room[i] > step]
            spans = [self._span(progress, drafts[progress.sequence_id]) for progress in active]
            logits = self._runner.forward(spans).logits
            assert logits is not None
            for progress, token, q in _choose(logits, active, drafts):
                drafts[progress.sequence_id].append(token)
                if q is not None:
                    laws.setdefault(progress.sequence_id, []).append(q)
        return DraftBatch.chains(drafts.items(), _pack(drafts, laws))

    def _room(self, progress: Progress) -> int:
        """Tokens it may draft: the newest committed one and all drafts but the last are computed, in slots of their own."""
        if progress.depth == 0 or progress.sequence_id not in self._tables:
            return 0
        return max(0, min(progress.depth, self._tables.capacity(progress.sequence_id) - len(progress.ids)))

    def _span(self, progress: Progress, draft: Sequence[int]) -> Span:
        newest = draft[-1] if draft else progress.ids[-1]
        blocks = self._tables.blocks(progress.sequence_id)
        return Span(blocks, len(progress.ids) - 1 + len(draft), [newest], num_logits=1)


def _choose(
    logits: Tensor, active: Sequence[Progress], drafts: dict[int, list[int]]
) -> list[tuple[Progress, int, Tensor | None]]:
    """The next token of each, and `q` for those that rejection will check."""
    rows = [draft_row(progress, tuple(drafts[progress.sequence_id])) for progress in active]
    drawn = [i for i, p in enumerate(active) if p.verification == "rejection" and not p.sampling.is_greedy]
    picked = [i for i in range(len(active)) if i not in drawn]
    chosen: list[tuple[Progress, int, Tensor | None]] = []
    if picked:
        tokens = pick(logits[picked], [rows[i] for i in picked]).tolist()
        chosen.extend((active[i], token, None) for i, token in zip(picked, tokens, strict=True))
    if drawn:
        sample, q = sample_draft(logits[drawn], [rows[i] for i in drawn])
        chosen.extend((active[i], token, law) for i, token, law in zip(drawn, sample.tolist(), q, strict=True))
    return chosen


def _pack(drafts: dict[int, list[int]], laws: dict[int, list[Tensor]]) -> DraftProbs | None:
    if not laws:
        return None
    some = next(iter(laws.values()))[0]
    rows = []
    for sequence_id, tokens in drafts.items():
        if sequence_id in laws:
            rows.extend(laws[sequence_id])
        else:  # coupled or greedy beside it in the batch: one-hot
            index = torch.tensor(tokens, device=some.device)
            rows.extend(torch.nn.functional.one_hot(index, len(some)).to(some.dtype))
    return DraftProbs(torch.stack(rows))
