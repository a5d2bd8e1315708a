"""Batches of several proposers as one."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.speculation.drafts import DraftBatch, DraftProbs


def merge(batches: Sequence[DraftBatch]) -> DraftBatch:
    """All drafts of `batches`, which share no sequence. Where one has a `q`, drafts without get the one-hot they mean."""
    batches = [batch for batch in batches if batch.sequence_ids]
    if not batches:
        return DraftBatch.empty()
    if len(batches) == 1:
        return batches[0]
    return DraftBatch(
        tuple(sequence_id for batch in batches for sequence_id in batch.sequence_ids),
        tuple(count for batch in batches for count in batch.counts),
        torch.cat([batch.tokens.cpu() for batch in batches]),
        torch.cat([batch.parents.cpu() for batch in batches]),
        _merge_probs(batches),
    )


def _merge_probs(batches: Sequence[DraftBatch]) -> DraftProbs | None:
    given = [batch.probs for batch in batches if batch.probs is not None]
    if not given:
        return None
    device = given[0].probs.device
    rows = [batch.probs or _one_hot(batch.tokens, device) for batch in batches]
    dense = next((probs for probs in given if probs.ids is None), None)
    if dense is not None:
        vocab_size = dense.probs.shape[1]
        return DraftProbs(torch.cat([probs.dense(slice(None), vocab_size).to(device) for probs in rows]))
    width = max(probs.probs.shape[1] for probs in rows)
    ids = [pad(probs.ids, (0, width - probs.probs.shape[1])).to(device) for probs in rows if probs.ids is not None]
    return DraftProbs(
        torch.cat([pad(probs.probs, (0, width - probs.probs.shape[1])).to(device) for probs in rows]), torch.cat(ids)
    )


def _one_hot(tokens: Tensor, device: torch.device) -> DraftProbs:
    return DraftProbs(torch.ones(len(tokens), 1, device=device), tokens.to(device).unsqueeze(1))
