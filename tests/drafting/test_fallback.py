"""The fallback of a pool: chains of a local proposer."""

from collections.abc import Sequence

import torch

from paceline.drafting.drafts import DraftChain
from paceline.drafting.proposer import FallbackDrafts
from paceline.speculation.drafts.drafts import DraftBatch, DraftProbs
from paceline.speculation.proposer import ProposerTraits, SequenceProgress
from tests.drafting.fakes import progress


class Local:
    """Returns `answer` and records its calls."""

    def __init__(self, answer: DraftBatch) -> None:
        self.traits, self.answer = ProposerTraits(), answer
        self.observed: list[SequenceProgress] = []
        self.collected: list[tuple[Sequence[int], float]] = []
        self.closed: list[int] = []

    def observe(self, batch: Sequence[SequenceProgress]) -> None:
        self.observed += batch

    def collect(self, sequence_ids: Sequence[int], deadline: float) -> DraftBatch:
        self.collected.append((sequence_ids, deadline))
        return self.answer

    def close(self, sequence_ids: Sequence[int]) -> None:
        self.closed += sequence_ids


def test_chains_are_used_and_trees_are_not() -> None:
    tree = DraftBatch((1, 2), (2, 2), torch.tensor([3, 4, 5, 6]), torch.tensor([-1, 0, -1, -1]))
    local = Local(tree)
    fallback = FallbackDrafts(local)
    batch = [progress(1), progress(2), progress(3, depth=0)]
    assert fallback.collect(batch, 9.0) == {1: DraftChain((3, 4), ())}
    assert local.collected == [([1, 2], 9.0)]


def test_drafts_with_distributions_are_not_used() -> None:
    drafts = DraftBatch.chains([(1, [3])], DraftProbs(torch.ones(1, 1), torch.tensor([[3]])))
    assert FallbackDrafts(Local(drafts)).collect([progress(1)], 9.0) == {}


def test_a_chain_ends_before_the_last_token_of_the_request() -> None:
    local = Local(DraftBatch.empty())
    FallbackDrafts(local).observe(iter([progress(1, depth=6, max_levels=2), progress(2, depth=1, max_levels=2)]))
    assert [one.depth for one in local.observed] == [2, 1]


def test_without_sequences_or_a_proposer_there_is_no_draft() -> None:
    local = Local(DraftBatch.chains([(1, [3])]))
    assert FallbackDrafts(local).collect([], 9.0) == {}
    assert local.collected == []
    absent = FallbackDrafts(None)
    absent.observe([progress(1)])
    assert absent.collect([progress(1)], 9.0) == {}
    absent.close([1])
    FallbackDrafts(local).close([1, 2])
    assert local.closed == [1, 2]
