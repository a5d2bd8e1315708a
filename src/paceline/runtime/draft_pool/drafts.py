"""Chains as they come off the wire, put together for verification."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.runtime.draft_worker.distributions import TOTAL, Law
from paceline.speculation.drafts import DraftBatch, DraftProbs


class Chain(NamedTuple):
    tokens: tuple[int, ...]
    laws: tuple[Law, ...]
    """One a token under rejection, none otherwise."""


def batch_of(chains: Mapping[int, Chain]) -> DraftBatch:
    """Chains by sequence. Where any has laws, those without are one-hot beside them."""
    drafted = {number: chain for number, chain in chains.items() if chain.tokens}
    if not drafted:
        return DraftBatch.empty()
    tokens: list[int] = []
    for chain in drafted.values():
        tokens += chain.tokens
    counts = tuple(len(chain.tokens) for chain in drafted.values())
    probs = _probs(list(drafted.values()), len(tokens))
    # By way of numpy: `torch.tensor` takes twice as long over a list
    return DraftBatch(tuple(drafted), counts, torch.from_numpy(np.array(tokens, np.int64)), _parents(counts), probs)


@lru_cache(maxsize=64)
def _parents(counts: tuple[int, ...]) -> Tensor:
    """[sum of counts] of chains; most batches are of a shape seen before."""
    return torch.from_numpy(np.concatenate([np.arange(-1, count - 1) for count in counts]))


def _probs(chains: list[Chain], count: int) -> DraftProbs | None:
    """[count, M] of the laws; None where there are none."""
    laws = [law for chain in chains for law in chain.laws]
    if not laws:
        return None
    width = max(len(law.tokens) for law in laws)
    ids = torch.zeros(count, width, dtype=torch.int64)
    weights = torch.zeros(count, width, dtype=torch.float32)
    row = 0
    for chain in chains:
        for i, token in enumerate(chain.tokens):
            if chain.laws:
                law = chain.laws[i]
                ids[row, : len(law.tokens)] = law.tokens
                weights[row, : len(law.tokens)] = law.weights.to(torch.float32) / TOTAL
            else:
                ids[row, 0], weights[row, 0] = token, 1.0
            row += 1
    return DraftProbs(weights, ids)
