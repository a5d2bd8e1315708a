import torch

from paceline.speculation.drafts import DraftBatch, DraftProbs
from paceline.speculation.trees.merging import merge

VOCAB = 6


def batch(sequence_id: int, tokens: list[int], probs: DraftProbs | None = None) -> DraftBatch:
    return DraftBatch.chains([(sequence_id, tokens)], probs)


def dense(rows: int) -> DraftProbs:
    return DraftProbs(torch.full((rows, VOCAB), 1 / VOCAB))


def sparse(tokens: list[int], width: int) -> DraftProbs:
    ids = torch.tensor([[token + k for k in range(width)] for token in tokens])
    return DraftProbs(torch.full((len(tokens), width), 1 / width), ids)


def test_every_draft_keeps_its_own() -> None:
    tree = DraftBatch((2,), (3,), torch.tensor([1, 2, 3]), torch.tensor([-1, -1, 0]))
    drafts = merge([batch(1, [4, 5]), DraftBatch.empty(), tree]).split()
    assert drafts[1].tokens == (4, 5)
    assert drafts[1].is_chain
    assert (drafts[2].tokens, drafts[2].parents) == ((1, 2, 3), (-1, -1, 0))
    assert drafts[2].probs is None
    assert merge([]).sequence_ids == ()
    assert merge([DraftBatch.empty()]).sequence_ids == ()


def test_one_hot_beside_a_dense_q() -> None:
    drafts = merge([batch(1, [4, 5]), batch(2, [3], dense(1)), batch(3, [1], sparse([1], 2))]).split()
    first, second, third = (drafts[i].q(VOCAB) for i in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert torch.equal(second, dense(1).probs)
    assert third.tolist() == [[0, 0.5, 0.5, 0, 0, 0]]


def test_one_hot_beside_sparse_qs_of_several_widths() -> None:
    drafts = merge([batch(1, [2, 3], sparse([2, 3], 2)), batch(2, [0]), batch(3, [1], sparse([1], 4))]).split()
    expected = {
        1: [[0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0.5, 0.5, 0]],
        2: [[1, 0, 0, 0, 0, 0]],
        3: [[0, 0.25, 0.25, 0.25, 0.25, 0]],
    }
    for sequence_id, rows in expected.items():
        q = drafts[sequence_id].q(VOCAB)
        assert q is not None
        assert q.tolist() == rows
