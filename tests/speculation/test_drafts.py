import pytest
import torch

from paceline.speculation.drafts import Draft, DraftBatch, DraftProbs

# 0 ── 1 ── 3
#  \─ 2      \─ 4      5 is a second child of the root
TREE = Draft(tokens=(10, 11, 12, 13, 14, 15), parents=(-1, 0, 0, 1, 3, -1))


def test_chains_are_ragged_and_split_again() -> None:
    batch = DraftBatch.chains([(7, [1, 2, 3]), (4, []), (9, [5])])
    assert batch.sequence_ids == (7, 9)
    assert batch.counts == (3, 1)
    assert batch.tokens.tolist() == [1, 2, 3, 5]
    assert batch.parents.tolist() == [-1, 0, 1, -1]
    drafts = batch.split()
    assert {i: draft.tokens for i, draft in drafts.items()} == {7: (1, 2, 3), 9: (5,)}
    assert all(draft.is_chain for draft in drafts.values())
    assert [draft.rows for draft in drafts.values()] == [slice(0, 3), slice(3, 4)]


def test_nothing_drafted_is_an_empty_batch() -> None:
    for batch in (DraftBatch.empty(), DraftBatch.chains([]), DraftBatch.chains([(1, [])])):
        assert batch.split() == {}
        assert batch.tokens.dtype == batch.parents.dtype == torch.int64


@pytest.mark.parametrize(
    ("ids", "counts", "num_tokens", "num_parents"),
    [((1,), (), 0, 0), ((1,), (2,), 1, 1), ((1,), (1,), 1, 2), ((1, 2), (1, 1), 1, 1)],
)
def test_lengths_must_agree(ids: tuple[int, ...], counts: tuple[int, ...], num_tokens: int, num_parents: int) -> None:
    with pytest.raises(ValueError, match="disagree"):
        DraftBatch(ids, counts, torch.zeros(num_tokens).long(), torch.zeros(num_parents).long())


def test_path_children_and_shape_of_a_tree() -> None:
    assert not TREE.is_chain
    assert len(TREE) == 6
    assert TREE.path(-1) == ()
    assert TREE.path(0) == (0,)
    assert TREE.path(4) == (0, 1, 3, 4)
    assert TREE.path(5) == (5,)
    assert TREE.children(-1) == [0, 5]
    assert TREE.children(0) == [1, 2]
    assert TREE.children(4) == []


def test_an_empty_draft_is_a_chain() -> None:
    assert Draft().is_chain
    assert not Draft()
    assert Draft().q(10) is None


def test_dense_q_is_cut_by_sequence() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
    drafts = DraftBatch.chains([(0, [1]), (1, [2, 2])], DraftProbs(probs)).split()
    q = drafts[1].q(3)
    assert q is not None
    torch.testing.assert_close(q, probs[1:])


def test_sparse_q_spreads_over_the_vocabulary_and_padding_overwrites_nothing() -> None:
    probs = DraftProbs(
        probs=torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0]]),
        ids=torch.tensor([[3, 1, 3], [2, 2, 2]]),  # padding repeats an id that is in use
    )
    expected = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(probs.dense(slice(0, 2), 5), expected)
    torch.testing.assert_close(probs.dense(slice(1, 2), 5), expected[1:])
