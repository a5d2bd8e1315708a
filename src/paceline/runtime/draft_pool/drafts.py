"""Received drafts as a `DraftBatch` for verification."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.runtime.draft_pool.tree_split import TreeSplit
from paceline.runtime.draft_worker.branches import BranchKey
from paceline.runtime.draft_worker.distributions import TOTAL_WEIGHT, DraftDistribution
from paceline.runtime.wire.codec import MalformedMessage
from paceline.runtime.wire.messages import RoundDraft
from paceline.speculation.drafts import DraftBatch, DraftProbs, merge_batches
from paceline.speculation.proposer import SequenceProgress


class DraftChain(NamedTuple):
    tokens: tuple[int, ...]
    distributions: tuple[DraftDistribution, ...]
    """One per token under rejection, otherwise empty."""
    alternatives: tuple[BranchKey, ...] = ()
    """Tokens to verify in the same step as the chain, each with the number of chain tokens before it. Empty under rejection."""


def as_chain(progress: SequenceProgress) -> SequenceProgress:
    """Its depth as that of a chain, which ends before the last token of the request."""
    levels = progress.max_levels
    return progress if levels is None or progress.depth <= levels else replace(progress, depth=levels)


def validated_alternatives(draft: RoundDraft, most: int, vocab_size: int) -> tuple[BranchKey, ...]:
    """The alternatives of an answer, at most `most`. Raises `MalformedMessage` unless they form a tree with its chain."""
    flat = draft.alternatives
    keys = [BranchKey(*pair) for pair in zip(flat[::2], flat[1::2], strict=False)]
    if len(keys) > most or len(flat) % 2 or len({*keys}) < len(keys):
        raise MalformedMessage(f"{len(flat)} numbers as {most} different alternatives")
    for accepted, token in keys:
        if accepted >= len(draft.tokens) or token == draft.tokens[accepted] or token >= vocab_size:
            raise MalformedMessage(f"token {token} as an alternative after {accepted} tokens")
    return tuple(keys)


def to_draft_batch(chains: Mapping[int, DraftChain], split: TreeSplit) -> DraftBatch:
    """`chains` by sequence id. In a batch with distributions, the tokens without one are one-hot. `split` orders the nodes of
    chains with alternatives."""
    trees = {i: split.tree(chain.tokens, chain.alternatives) for i, chain in chains.items() if chain.alternatives}
    if trees:
        others = {sequence_id: chain for sequence_id, chain in chains.items() if sequence_id not in trees}
        return merge_batches([DraftBatch.trees(trees.items()), to_draft_batch(others, split)])
    drafted = {sequence_id: chain for sequence_id, chain in chains.items() if chain.tokens}
    if not drafted:
        return DraftBatch.empty()
    tokens: list[int] = []
    for chain in drafted.values():
        tokens += chain.tokens
    counts = tuple(len(chain.tokens) for chain in drafted.values())
    probs = _draft_probs(list(drafted.values()), len(tokens))
    # numpy converts a list twice as fast as torch.tensor
    return DraftBatch(tuple(drafted), counts, torch.from_numpy(np.array(tokens, np.int64)), _parents(counts), probs)


@lru_cache(maxsize=64)
def _parents(counts: tuple[int, ...]) -> Tensor:
    """Parents of chains, [sum of counts]. Most batches repeat the shape of an earlier one."""
    return torch.from_numpy(np.concatenate([np.arange(-1, count - 1) for count in counts]))


def _draft_probs(chains: list[DraftChain], num_tokens: int) -> DraftProbs | None:
    """Probabilities [num_tokens, M]. None if no chain has distributions."""
    distributions = [distribution for chain in chains for distribution in chain.distributions]
    if not distributions:
        return None
    width = max(len(distribution.tokens) for distribution in distributions)
    ids = torch.zeros(num_tokens, width, dtype=torch.int64)
    weights = torch.zeros(num_tokens, width, dtype=torch.float32)
    row = 0
    for chain in chains:
        for i, token in enumerate(chain.tokens):
            if chain.distributions:
                q = chain.distributions[i]
                ids[row, : len(q.tokens)] = q.tokens
                weights[row, : len(q.tokens)] = q.weights.to(torch.float32) / TOTAL_WEIGHT
            else:
                ids[row, 0], weights[row, 0] = token, 1.0
            row += 1
    return DraftProbs(weights, ids)
