"""The proposer `draft_model`: a smaller model of the same vocabulary drafts trees or chains."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.models.runner import ModelRunner
from paceline.speculation import DraftWeights, ProposerTraits, SequenceProgress
from paceline.speculation.distribution import sample_draft
from paceline.speculation.drafts import DraftBatch, DraftCost, DraftPrefill, DraftProbs, merge_batches
from paceline.speculation.proposers.model.model_drafter import Chunk, DraftSequence, ModelDrafter, SequenceParams
from paceline.speculation.proposers.model.model_trees import LEVELS, ModelTrees, TreeRequest
from paceline.speculation.rows import RowContext


class DraftModelProposer:
    """Drafts with a model that has its own KV cache of fixed size. A sequence that does not fit there, or is longer than the
    draft's window, gets no drafts.

    It computes nothing for a sequence before the first request for drafts. Tokens that are sampled from `q` for rejection are
    chains: a tree chosen by confidence would change the distribution of the text.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        num_proposable: int,
        vocab_size: int,
        prefix_caching: bool = True,
        max_gap: int | None = None,
        branches: int = 1,
    ) -> None:
        """`ModelDrafter` describes `max_rows`, `num_proposable` and `vocab_size`. `max_gap` is the number of missing tokens
        that a step may compute, by default as many as one pass computes. `branches` is the most children of a node. With 1 the
        drafts are chains."""
        self.drafter = ModelDrafter(runner, max_rows, num_proposable, vocab_size, _sample_dense, prefix_caching)
        self.max_gap = max_gap or max_rows
        """Tokens of draft prefill within one step."""
        self._sequences: dict[int, DraftSequence] = {}
        self._depths: dict[int, int] = {}
        self._levels: dict[int, int] = {}
        """Longest path of each draft that is requested."""
        self._trees = ModelTrees(self.drafter, branches) if branches > 1 else None
        self._weights = DraftWeights(runner.model, self._stop_sharing)
        self.traits = ProposerTraits(
            is_tree=branches > 1,
            is_lazy=True,
            can_run_in_graph=branches == 1,
            runners=(runner,),
            weights=self._weights,
            q_model=runner.model,
        )

    @property
    def num_free_blocks(self) -> int:
        return self.drafter.num_free_blocks

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            sequence = self._sequences.get(progress.sequence_id)
            if sequence is None:
                sequence = self._sequences[progress.sequence_id] = self._new_sequence(progress)
            else:
                if self._trees is not None:
                    self._trees.commit(sequence, progress.ids)
                sequence.commit(progress.ids)
                self.drafter.release_unused(sequence)
            most = progress.depth if progress.max_levels is None else min(progress.depth, progress.max_levels)
            self._depths[progress.sequence_id] = progress.depth
            self._levels[progress.sequence_id] = min(most, LEVELS) if self._grows_tree(sequence) else most

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        if self._trees is not None:
            self._trees.close_all()
        sequences, cost = self._prefill(i for i in sequence_ids if self._levels.get(i))
        if not sequences:
            return DraftBatch.empty(cost)
        chains = [sequence for sequence in sequences if not self._grows_tree(sequence)]
        if len(chains) == len(sequences):
            return self._draft_chains(chains, cost)
        trees = self._draft_trees([sequence for sequence in sequences if self._grows_tree(sequence)], cost)
        return replace(merge_batches([self._draft_chains(chains, cost), trees]), cost=cost) if chains else trees

    def _grows_tree(self, sequence: DraftSequence) -> bool:
        return self._trees is not None and not sequence.params.needs_distribution

    def _draft_trees(self, sequences: Sequence[DraftSequence], cost: DraftCost) -> DraftBatch:
        assert self._trees is not None
        requests = [
            TreeRequest(sequence, self._depths[sequence.id], self._levels[sequence.id]) for sequence in sequences
        ]
        return DraftBatch.trees(
            zip([sequence.id for sequence in sequences], self._trees.draft(requests), strict=True), cost
        )

    def _draft_chains(self, sequences: Sequence[DraftSequence], cost: DraftCost) -> DraftBatch:
        probs: dict[tuple[int, int], Tensor] = {}  # (sequence, step) -> q [V]
        active = sequences
        for step in range(max(self._levels[sequence.id] for sequence in sequences)):
            active = [sequence for sequence in active if self._levels[sequence.id] > step]
            logits = self.drafter.forward([Chunk(sequence, sequence.num_missing) for sequence in active])
            assert logits is not None
            chosen = self.drafter.choose(logits, active, [sequence.row() for sequence in active])
            for sequence, (token, q) in zip(active, chosen, strict=True):
                sequence.ids.append(token)
                if q is not None:
                    probs[sequence.id, step] = q
        drafts = [(sequence.id, sequence.ids[sequence.num_committed :]) for sequence in sequences]
        return DraftBatch.chains(drafts, self._pack(drafts, probs), cost)

    def close(self, sequence_ids: Sequence[int]) -> None:
        if self._trees is not None:
            self._trees.close(sequence_ids)
        for sequence_id in sequence_ids:
            self._depths.pop(sequence_id, None)
            self._levels.pop(sequence_id, None)
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self.drafter.close([sequence])

    def sequence(self, sequence_id: int) -> DraftSequence | None:
        """The sequence in the draft's cache; None if it was never observed."""
        return self._sequences.get(sequence_id)

    def prefill(self, sequence_ids: Sequence[int]) -> DraftPrefill:
        """Compute the missing tokens of these sequences, within the limit of a step; returns the cost."""
        return self._prefill(i for i in sequence_ids if i in self._sequences)[1].prefill

    def _prefill(self, sequence_ids: Iterable[int]) -> tuple[list[DraftSequence], DraftCost]:
        """Sequences that can draft now, and the cost of the draft prefill."""
        sequences = [self._sequences[i] for i in sequence_ids]
        # The last drafted token is not computed
        fitting = [
            sequence
            for sequence in sequences
            if self.drafter.is_in_window(len(sequence.ids) + self._levels[sequence.id] - 1)
        ]
        return self.drafter.prefill(fitting, [self._levels[sequence.id] for sequence in fitting], self.max_gap)

    def _new_sequence(self, progress: SequenceProgress) -> DraftSequence:
        params = SequenceParams(
            progress.sampling,
            progress.seed,
            progress.choice,
            progress.num_prompt,
            progress.verification,
            self._weights.salt(progress.cache_salt),
        )
        return DraftSequence(progress.sequence_id, params, list(progress.ids), len(progress.ids))

    def _stop_sharing(self) -> None:
        """The weights were exchanged: the open sequences continue a cache of the other weights."""
        for sequence in self._sequences.values():
            sequence.is_shared = False

    def _pack(self, drafts: list[tuple[int, list[int]]], probs: dict[tuple[int, int], Tensor]) -> DraftProbs | None:
        """Distributions [N, V] of all drafted tokens; None if no sequence of the batch needs them."""
        if not probs:
            return None
        rows = []
        for sequence_id, tokens in drafts:
            for step, token in enumerate(tokens):
                q = probs.get((sequence_id, step))
                if q is None:  # coupled or greedy: one-hot
                    q = torch.zeros(self.drafter.vocab_size, device=self.drafter.runner.device)
                    q[token] = 1.0
                rows.append(q)
        return DraftProbs(torch.stack(rows))


def _sample_dense(logits: Tensor, rows: Sequence[RowContext]) -> Iterable[tuple[int, Tensor]]:
    tokens, q = sample_draft(logits, rows)
    return zip(tokens.tolist(), q, strict=True)
