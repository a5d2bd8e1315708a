"""Medusa heads on the target's last hidden state; their guesses multiply into a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.models.drafts.medusa import MedusaModel
from paceline.speculation.drafts import DraftBatch
from paceline.speculation.proposer import HiddenRequest, Progress, ProposerTraits
from paceline.speculation.trees.growth import Growth, tree_batch
from paceline.speculation.trees.ranking import draft_row, rank
from paceline.speculation.trees.tree import MAX_NODES
from paceline.speculation.verification.rows import RowContext

BRANCHES = 32
"""Candidates of each head: where heads are unsure, a wide tree beats a deep one."""


@dataclass(slots=True)
class _Rider:
    progress: Progress
    state: Tensor | None = None  # [D], of the last computed token
    end: int = 0
    """How many tokens were computed when `state` was."""


class MedusaProposer:
    """One step of the heads, then the `depth` likeliest paths through their candidates: a head knows nothing of what the
    one before it guessed, so a path is worth the product of its confidences. Keeps one row a sequence."""

    def __init__(self, model: MedusaModel) -> None:
        self._model = model
        self._riders: dict[int, _Rider] = {}
        self.traits = ProposerTraits(hidden=HiddenRequest(last=True), is_tree=True, heads=(model,))

    def observe(self, batch: Sequence[Progress]) -> None:
        for progress in batch:
            rider = self._riders.setdefault(progress.sequence_id, _Rider(progress))
            rider.progress = progress
            hidden = progress.hidden
            if hidden is not None and hidden.last is not None:
                rider.state, rider.end = hidden.last[-1], hidden.end

    @torch.inference_mode()
    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        riders = [rider for i in sequence_ids if (rider := self._riders.get(i)) and rider.progress.depth > 0]
        # The state of the token before the newest one: anything older would draft what is committed already
        riders = [rider for rider in riders if rider.state is not None and rider.end == len(rider.progress.ids) - 1]
        if not riders:
            return DraftBatch.empty()
        states = torch.stack([rider.state for rider in riders if rider.state is not None])
        logits = self._model.logits(states).flatten(0, 1)  # [S * H, V'], rows of a sequence together
        heads = self._model.num_heads
        rows = [_row(rider.progress, step) for rider in riders for step in range(heads)]
        coupled = [rider.progress.verification == "coupled" for rider in riders for _ in range(heads)]
        branches = rank(logits, rows, coupled, self._model.vocabulary, BRANCHES)
        trees = []
        for i, rider in enumerate(riders):
            growth = Growth(min(rider.progress.depth, MAX_NODES), rider.progress.max_levels)
            growth.add(-1, branches[i * heads])
            for level in range(1, heads):
                for node in growth.frontier(level, growth.budget):
                    growth.add(node, branches[i * heads + level])
            trees.append((rider.progress.sequence_id, growth))
        return tree_batch(trees)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._riders.pop(sequence_id, None)


def _row(progress: Progress, step: int) -> RowContext:
    """Of drafted token number `step`; what comes between is not known yet."""
    row = draft_row(progress, ())
    return (
        row if step == 0 else RowContext(row.params, row.seed, row.choice, row.position + step, row.ids, row.num_prompt)
    )
