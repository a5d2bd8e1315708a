"""The proposer `medusa`: heads on the target's last hidden state, whose candidates are combined into a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.heads import MedusaModel
from paceline.speculation import DraftWeights, HiddenRequest, ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.rows import RowContext
from paceline.speculation.trees import Growth, draft_row, rank
from paceline.speculation.verification import MAX_NODES

BRANCHES = 32
"""Candidates of each head. If heads are unsure, a wide tree is better than a deep one."""


@dataclass(slots=True)
class _Sequence:
    progress: SequenceProgress
    state: Tensor | None = None  # [D], of the last computed token
    end: int = 0
    """Tokens computed when `state` was."""


class MedusaProposer:
    """Drafts the `depth` most probable nodes of the tree of all heads' candidates. The heads are independent, so the value of a
    path is the product of its confidences. It keeps one hidden state per sequence."""

    def __init__(self, model: MedusaModel) -> None:
        self._model = model
        self._sequences: dict[int, _Sequence] = {}
        self.traits = ProposerTraits(
            hidden=HiddenRequest(last=True), is_tree=True, heads=(model,), weights=DraftWeights(model)
        )

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            sequence = self._sequences.setdefault(progress.sequence_id, _Sequence(progress))
            sequence.progress = progress
            hidden = progress.hidden
            if hidden is not None and hidden.last is not None:
                sequence.state, sequence.end = hidden.last[-1], hidden.end

    @torch.inference_mode()
    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        sequences = [
            sequence for i in sequence_ids if (sequence := self._sequences.get(i)) and sequence.progress.depth > 0
        ]
        # The state must be that of the token before the newest one: an older state would draft committed tokens
        sequences = [
            sequence
            for sequence in sequences
            if sequence.state is not None and sequence.end == len(sequence.progress.ids) - 1
        ]
        if not sequences:
            return DraftBatch.empty()
        states = torch.stack([sequence.state for sequence in sequences if sequence.state is not None])
        logits = self._model.logits(states).flatten(0, 1)  # [S * H, V'], rows of a sequence together
        heads = self._model.num_heads
        rows = [_row(sequence.progress, step) for sequence in sequences for step in range(heads)]
        coupled = [sequence.progress.verification == "coupled" for sequence in sequences for _ in range(heads)]
        branches = rank(logits, rows, coupled, self._model.vocabulary, BRANCHES)
        trees = []
        for i, sequence in enumerate(sequences):
            growth = Growth(min(sequence.progress.depth, MAX_NODES), sequence.progress.max_levels)
            growth.add(-1, branches[i * heads])
            for level in range(1, heads):
                for node in growth.frontier(level, growth.budget):
                    growth.add(node, branches[i * heads + level])
            trees.append((sequence.progress.sequence_id, growth.draft()))
        return DraftBatch.trees(trees)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)


def _row(progress: SequenceProgress, step: int) -> RowContext:
    """The row of drafted token number `step`. The tokens before it are not known yet."""
    row = draft_row(progress, ())
    return (
        row if step == 0 else RowContext(row.params, row.seed, row.choice, row.position + step, row.ids, row.num_prompt)
    )
