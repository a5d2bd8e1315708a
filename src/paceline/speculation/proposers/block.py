"""The proposer `dflash`: a DFlash or DSpark drafter, which proposes a chain from one pass over a block of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.traffic import TrafficClass
from paceline.models.heads.block import BlockRunner, MarkovState
from paceline.models.runner import Span
from paceline.speculation import HiddenRequest, ProposerTraits, SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftCost
from paceline.speculation.proposers.eagle import EagleCache, EagleSequence
from paceline.speculation.rows import RowContext
from paceline.speculation.trees import draft_row, rank


class BlockProposer:
    """Under coupled verification the noise of each position is known, so all picks of a block without a Markov head are made at
    once. With one, the pick of a position is the token before the next: the walk follows the target's text as long as its picks
    are right. It computes nothing for a sequence before the first request for drafts."""

    def __init__(self, runner: BlockRunner, max_rows: int, prefix_caching: bool = True) -> None:
        """`max_rows` is the most committed tokens that one call computes."""
        self._runner, self._model = runner, runner.model
        self._cache = EagleCache(runner, max_rows, prefix_caching)
        self.traits = ProposerTraits(
            hidden=HiddenRequest(layers=runner.model.config.state_layers),
            runners=(runner,),
            weights=self._cache.weights,
            traffic_class=self._traffic_class,
        )

    @property
    def num_free_blocks(self) -> int:
        return self._cache.tables.pool.num_free

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        for progress in batch:
            self._cache.observe(progress)

    def close(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            self._cache.close(sequence_id)

    @torch.inference_mode()
    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        known = [sequence for i in sequence_ids if (sequence := self._cache.sequences.get(i))]
        drafting = [sequence for sequence in known if sequence.progress.depth > 0]
        current, _ = self._cache.update(self._cache.next_updates(drafting))
        cost = DraftCost(self._cache.take_prefill())
        ready = [sequence for sequence in current if self._has_room(sequence)]
        if not ready:
            return DraftBatch.empty(cost)
        chains = self._draft(ready)
        for sequence in ready:  # the next context overwrites the block
            self._cache.tables.shrink(sequence.progress.sequence_id, sequence.num_cached)
        ids = [sequence.progress.sequence_id for sequence in ready]
        return DraftBatch.chains(zip(ids, chains, strict=True), cost=cost)

    def _has_room(self, sequence: EagleSequence) -> bool:
        """Whether the positions of a block exist, and the cache has room for it."""
        progress, rows = sequence.progress, self._model.config.block_size
        if len(progress.ids) - 1 + rows > len(self._model.cos):
            return False
        return self._cache.tables.grow(progress.sequence_id, sequence.num_cached + rows)

    def _draft(self, sequences: Sequence[EagleSequence]) -> list[list[int]]:
        """The drafted tokens of each sequence, at most as many as it is to draft."""
        config = self._model.config
        spans = [self._span(sequence) for sequence in sequences]
        rows = self._runner.draft(spans)[:, 0 if config.predicts_next else 1 :]  # [S, K, D]
        batch = [sequence.progress for sequence in sequences]
        rows = rows[:, : min(config.num_drafted, max(progress.depth for progress in batch))]
        chains = self._picks(rows, batch) if config.markov == "none" else self._walk(rows, batch)
        return [chain[: progress.depth] for chain, progress in zip(chains, batch, strict=True)]

    def _span(self, sequence: EagleSequence) -> Span:
        ids, config = sequence.progress.ids, self._model.config
        tokens = [ids[-1], *[config.mask_id] * (config.block_size - 1)]
        first = len(ids) - 1
        blocks = self._cache.tables.blocks(sequence.progress.sequence_id)
        return Span(blocks, sequence.num_cached, tokens, 0, range(first, first + config.block_size))

    def _picks(self, rows: Tensor, batch: Sequence[SequenceProgress]) -> list[list[int]]:
        """Picks of all rows [S, K, D] at once."""
        count, steps = rows.shape[:2]
        normed = rows.flatten(0, 1).contiguous()
        logits, _ = self._model.logits(normed, torch.empty(0))
        contexts = [_row(progress, step) for progress in batch for step in range(steps)]
        best = self._best(logits, contexts, [progress for progress in batch for _ in range(steps)])
        return [_until_none(best[i * steps : (i + 1) * steps]) for i in range(count)]

    def _walk(self, rows: Tensor, batch: Sequence[SequenceProgress]) -> list[list[int]]:
        """Picks from left to right, each after the one before."""
        chains: list[list[int | None]] = [[] for _ in batch]
        state: MarkovState | None = None
        for step in range(rows.shape[1]):
            before = [_last(chain, progress) for chain, progress in zip(chains, batch, strict=True)]
            previous = torch.tensor(before, device=rows.device)
            logits, state = self._model.logits(rows[:, step].contiguous(), previous, state)
            contexts = [
                draft_row(progress, tuple(_until_none(chain))) if None not in chain else _row(progress, step)
                for chain, progress in zip(chains, batch, strict=True)
            ]
            for chain, pick in zip(chains, self._best(logits, contexts, batch), strict=True):
                chain.append(pick)
        return [_until_none(chain) for chain in chains]

    def _best(
        self, logits: Tensor, contexts: Sequence[RowContext], owners: Sequence[SequenceProgress]
    ) -> list[int | None]:
        """The best token of each row. None if no token is possible."""
        coupled = [progress.verification == "coupled" for progress in owners]
        branches = rank(logits, contexts, coupled, self._model.vocabulary, 1)
        return [found[0][0] if found else None for found in branches]

    def _traffic_class(self, traffic: TrafficClass, sequence_id: int) -> TrafficClass:
        """The class of a sequence. Drafts for a prompt without states are worse."""
        sequence = self._cache.sequences.get(sequence_id)
        return traffic._replace(is_partial=True) if sequence is not None and sequence.is_partial else traffic


def _row(progress: SequenceProgress, step: int) -> RowContext:
    """The row of drafted token number `step`. The tokens before it are not known yet."""
    row = draft_row(progress, ())
    if step == 0:
        return row
    return RowContext(row.params, row.seed, row.choice, row.position + step, row.ids, row.num_prompt)


def _last(chain: Sequence[int | None], progress: SequenceProgress) -> int:
    """The newest token of a chain that has not ended, or the newest committed one."""
    newest = chain[-1] if chain else progress.ids[-1]
    return progress.ids[-1] if newest is None else newest


def _until_none(chain: Sequence[int | None]) -> list[int]:
    tokens: list[int] = []
    for token in chain:
        if token is None:
            break
        tokens.append(token)
    return tokens
