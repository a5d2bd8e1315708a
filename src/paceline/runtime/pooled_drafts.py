"""Chains as they come off the wire, put together for verification."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.runtime.laws import TOTAL, Law
from paceline.speculation.drafts import DraftBatch, DraftProbs


class Chain(NamedTuple):
    tokens: tuple[int, ...]
    laws: tuple[Law, ...]
    """One a token under rejection, none otherwise."""


def batch_of(chains: Mapping[int, Chain]) -> DraftBatch:
    """Chains by sequence. Where any has laws, those without are one-hot beside them."""
    drafted = {number: chain for number, chain in chains.items() if chain.tokens}
    laws = [law for chain in drafted.values() for law in chain.laws]
    probs = None
    if laws:
        count = sum(len(chain.tokens) for chain in drafted.values())
        width = max(len(law.tokens) for law in laws)
        ids = torch.zeros(count, width, dtype=torch.int64)
        weights = torch.zeros(count, width, dtype=torch.float32)
        row = 0
        for chain in drafted.values():
            for i, token in enumerate(chain.tokens):
                if chain.laws:
                    law = chain.laws[i]
                    ids[row, : len(law.tokens)] = law.tokens
                    weights[row, : len(law.tokens)] = law.weights.to(torch.float32) / TOTAL
                else:
                    ids[row, 0], weights[row, 0] = token, 1.0
                row += 1
        probs = DraftProbs(weights, ids)
    return DraftBatch.chains(((number, list(chain.tokens)) for number, chain in drafted.items()), probs)
