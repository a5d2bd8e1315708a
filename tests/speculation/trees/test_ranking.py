"""The best token is the draft's own pick under the target's rule."""

import pytest
import torch

from paceline.core.request import SamplingParams
from paceline.kernels.formats.linear import DenseWeight
from paceline.models.heads.vocabulary import DraftVocabulary
from paceline.speculation.distribution.distribution import log_distribution, pick
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.trees.growth import draft_row, rank
from tests.exactness.suite import SAMPLINGS

V = 40
IDS = torch.tensor([1, 3, 4, 7, 8, 11, 15, 16, 21, 22, 30, 33, 38])


def vocabulary(ids=None):
    return DraftVocabulary(V, DenseWeight(torch.zeros(V if ids is None else len(ids), 2)), ids)


def row(path=(), **sampling):
    sampling.pop("n", None)
    params = SamplingParams(**sampling)
    return draft_row(SequenceProgress(0, [5, 3, 9, 3], 4, params, params.seed or 0, 0, 2, "coupled"), path)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_best_token_is_the_pick(sampling, ids):
    vocabulary_ = vocabulary(ids)
    logits = 3 * torch.randn(6, V if ids is None else len(ids), generator=torch.Generator().manual_seed(1))
    rows = [row(path, **sampling) for path in ((), (3,), (7,), (3, 3), (1, 2), (1, 2, 3))]
    branches = rank(logits, rows, [True] * 6, vocabulary_, 4)
    assert [best[0][0] for best in branches] == pick(vocabulary_.expand_logits(logits), rows).tolist()
    for best in branches:
        values = [value for _, value in best]
        assert values == sorted(values, reverse=True)
        assert len({token for token, _ in best}) == len(best)
        assert sum(torch.tensor(values).exp()) <= 1.0001


def test_greedy_confidence_is_the_probability():
    logits = torch.randn(2, V)
    branches = rank(logits, [row(temperature=0.0)] * 2, [True, False], vocabulary(), 3)
    best = logits.log_softmax(1).topk(3)
    for found, tokens, values in zip(branches, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [token for token, _ in found] == tokens
        assert [value for _, value in found] == pytest.approx(values, abs=1e-5)


def test_rejection_ranks_by_q_alone_without_impossible_tokens():
    logits = torch.randn(1, V)
    sampled = row(temperature=0.8, top_k=3, seed=1)
    other = row(temperature=0.8, top_k=3, seed=2)
    log_q = log_distribution(logits, [sampled])[0]
    (found,) = rank(logits, [sampled], [False], vocabulary(), 8)
    assert [token for token, _ in found] == log_q.topk(3).indices.tolist()
    assert rank(logits, [other], [False], vocabulary(), 8) == [found]  # independent of the seed
    assert [value for _, value in found] == pytest.approx(log_q.topk(3).values.tolist(), abs=1e-5)


def test_logits_are_not_modified():
    logits = torch.randn(2, V)
    before = logits.clone()
    rank(logits, [row(temperature=1.0, seed=3), row(temperature=0.0)], [True, True], vocabulary(), 4)
    assert torch.equal(logits, before)
