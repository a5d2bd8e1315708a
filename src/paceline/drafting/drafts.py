"""Received drafts as a `DraftBatch` for verification.

`TreeSplit` decides how many nodes of a draft continue its chain, and how many are alternatives to the tokens of the chain. The
k-th token of a chain is accepted with probability S_k, the r-th alternative with P(r): a worker sends the most likely
alternatives first. S and P are learned from verified rounds and fall with k and r, so the n best nodes are those with the n
largest of all these values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.drafting.branches import TOTAL_WEIGHT, BranchKey, DraftDistribution
from paceline.policy.depth.acceptance import Acceptance
from paceline.speculation import SequenceProgress
from paceline.speculation.drafts import DraftBatch, DraftProbs, DraftTree, merge_batches
from paceline.wire.codec import MalformedMessage
from paceline.wire.draft_messages import MAX_DEPTH, RoundDraft

PROBE_EVERY = 16
"""Rounds of which one has an alternative more: an alternative that is never verified is never learned of."""
_CHAIN, _ALTERNATIVES = "chain", "alternatives"


class TreeSplit:
    """Learns by `observe`. It is pure: it uses no clock and no random numbers."""

    def __init__(self) -> None:
        self._acceptance = Acceptance[str](MAX_DEPTH)
        self._rounds = 0

    def observe(self, chain: Sequence[int], alternatives: Sequence[BranchKey], committed: Sequence[int]) -> None:
        """Learn from a round: the tokens that it committed, and the draft that was verified."""
        matched, end = 0, min(len(chain), len(committed))
        while matched < end and chain[matched] == committed[matched]:
            matched += 1
        if chain:
            self._acceptance.observe(_CHAIN, len(chain), matched)
        if alternatives:
            key = BranchKey(matched, committed[matched]) if matched < len(committed) else None
            path = [rank for rank, alternative in enumerate(alternatives) if alternative == key]
            self._acceptance.observe(
                _ALTERNATIVES,
                1,
                len(path),
                num_nodes=len(alternatives),
                path=[min(rank, MAX_DEPTH - 1) for rank in path],
            )

    def split(self, nodes: int, max_depth: int) -> tuple[int, int]:
        """(tokens of the chain, alternatives) of a draft of `nodes` nodes, whose chain has at most `max_depth` tokens."""
        self._rounds += 1
        survival, others = self._acceptance.survival(_CHAIN), self._acceptance.survival(_ALTERNATIVES)
        depth = min(1, nodes, max_depth)
        while depth < min(nodes, max_depth) and survival[depth] >= others[nodes - depth - 1]:
            depth += 1
        if self._rounds % PROBE_EVERY == 0 and depth == nodes > 1:
            depth -= 1
        return depth, nodes - depth

    def tree(self, chain: Sequence[int], alternatives: Sequence[BranchKey]) -> DraftTree:
        """The nodes of the chain and of the alternatives, best first."""
        survival, others = self._acceptance.survival(_CHAIN), self._acceptance.survival(_ALTERNATIVES)
        # Of equal values the chain comes first: a parent precedes its children
        nodes = [(-survival[k], 0, k, k - 1, token) for k, token in enumerate(chain)]
        for rank, (accepted, token) in enumerate(alternatives):
            value = min(others[rank], survival[accepted - 1]) if accepted else others[rank]
            nodes.append((-value, 1, rank, accepted - 1, token))
        nodes.sort()
        place = {k: i for i, (_, is_alternative, k, _, _) in enumerate(nodes) if not is_alternative} | {-1: -1}
        return DraftTree(tuple(token for *_, token in nodes), tuple(place[parent] for *_, parent, _ in nodes))


class DraftChain(NamedTuple):
    tokens: tuple[int, ...]
    distributions: tuple[DraftDistribution, ...]
    """One per token under rejection, otherwise empty."""
    alternatives: tuple[BranchKey, ...] = ()
    """Tokens to verify in the same step as the chain, each with the number of chain tokens before it. It is empty under
    rejection."""


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
