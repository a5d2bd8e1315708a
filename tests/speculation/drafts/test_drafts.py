"""Batches of drafts: how they are built, split and merged."""

from dataclasses import replace

import pytest
import torch

from paceline.speculation.drafts.drafts import (
    NO_COST,
    Draft,
    DraftBatch,
    DraftCost,
    DraftPrefill,
    DraftProbs,
    DraftTree,
    merge_batches,
)

# 0 ── 1 ── 3
#  \─ 2      \─ 4      5 is a second child of the root
TREE = Draft(tokens=(10, 11, 12, 13, 14, 15), parents=(-1, 0, 0, 1, 3, -1))


def test_chains_are_ragged_and_split_by_sequence() -> None:
    batch = DraftBatch.chains([(7, [1, 2, 3]), (4, []), (9, [5])])
    assert batch.sequence_ids == (7, 9)
    assert batch.counts == (3, 1)
    assert batch.tokens.tolist() == [1, 2, 3, 5]
    assert batch.parents.tolist() == [-1, 0, 1, -1]
    drafts = batch.split()
    assert {i: draft.tokens for i, draft in drafts.items()} == {7: (1, 2, 3), 9: (5,)}
    assert all(draft.is_chain for draft in drafts.values())
    assert [draft.rows for draft in drafts.values()] == [slice(0, 3), slice(3, 4)]


def test_a_batch_without_drafts_is_empty() -> None:
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


def test_paths_and_children_of_a_tree() -> None:
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


def test_dense_q_is_split_by_sequence() -> None:
    probs = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 1.0]])
    drafts = DraftBatch.chains([(0, [1]), (1, [2, 2])], DraftProbs(probs)).split()
    q = drafts[1].q(3)
    assert q is not None
    torch.testing.assert_close(q, probs[1:])


def test_sparse_q_becomes_dense_and_padding_overwrites_nothing() -> None:
    probs = DraftProbs(
        probs=torch.tensor([[0.75, 0.25, 0.0], [1.0, 0.0, 0.0]]),
        ids=torch.tensor([[3, 1, 3], [2, 2, 2]]),  # padding repeats an id that is in use
    )
    expected = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(probs.dense(slice(0, 2), 5), expected)
    torch.testing.assert_close(probs.dense(slice(1, 2), 5), expected[1:])


def test_trees_leave_out_empty_ones() -> None:
    tree = DraftTree((10, 11), (-1, -1))
    batch = DraftBatch.trees([(7, tree), (8, DraftTree()), (9, DraftTree((10,), (-1,)))])
    drafts = batch.split()
    assert list(drafts) == [7, 9]
    assert drafts[7].tokens == (10, 11)
    assert drafts[9].parents == (-1,)
    assert batch.probs is None


def test_a_tree_matches_the_text_along_a_path() -> None:
    tree = DraftTree(TREE.tokens, TREE.parents)
    assert [tree.num_matched(text) for text in ((), (9,), (15, 1), (10, 11, 13, 14, 7), (10, 12))] == [0, 0, 1, 4, 2]


def test_draft_prefills_add_up() -> None:
    assert DraftPrefill(3, 0.5) + DraftPrefill(4, 0.25) == DraftPrefill(7, 0.75)


# --- merging

VOCAB = 6


def batch(sequence_id: int, tokens: list[int], probs: DraftProbs | None = None) -> DraftBatch:
    return DraftBatch.chains([(sequence_id, tokens)], probs)


def dense(rows: int) -> DraftProbs:
    return DraftProbs(torch.full((rows, VOCAB), 1 / VOCAB))


def sparse(tokens: list[int], width: int) -> DraftProbs:
    ids = torch.tensor([[token + k for k in range(width)] for token in tokens])
    return DraftProbs(torch.full((len(tokens), width), 1 / width), ids)


def test_merged_drafts_are_unchanged() -> None:
    tree = DraftBatch((2,), (3,), torch.tensor([1, 2, 3]), torch.tensor([-1, -1, 0]))
    drafts = merge_batches([batch(1, [4, 5]), DraftBatch.empty(), tree]).split()
    assert drafts[1].tokens == (4, 5)
    assert drafts[1].is_chain
    assert (drafts[2].tokens, drafts[2].parents) == ((1, 2, 3), (-1, -1, 0))
    assert drafts[2].probs is None
    assert merge_batches([]).sequence_ids == ()
    assert merge_batches([DraftBatch.empty()]).sequence_ids == ()
    assert merge_batches([replace(batch(1, [4]), cost=DraftCost(network_seconds=1.0))]).cost == NO_COST


def test_drafts_without_q_get_one_hot_rows_beside_a_dense_q() -> None:
    drafts = merge_batches([batch(1, [4, 5]), batch(2, [3], dense(1)), batch(3, [1], sparse([1], 2))]).split()
    first, second, third = (drafts[i].q(VOCAB) for i in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert first.tolist() == [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]
    assert torch.equal(second, dense(1).probs)
    assert third.tolist() == [[0, 0.5, 0.5, 0, 0, 0]]


def test_drafts_without_q_get_one_hot_rows_beside_sparse_qs() -> None:
    drafts = merge_batches([batch(1, [2, 3], sparse([2, 3], 2)), batch(2, [0]), batch(3, [1], sparse([1], 4))]).split()
    expected = {
        1: [[0, 0, 0.5, 0.5, 0, 0], [0, 0, 0, 0.5, 0.5, 0]],
        2: [[1, 0, 0, 0, 0, 0]],
        3: [[0, 0.25, 0.25, 0.25, 0.25, 0]],
    }
    for sequence_id, rows in expected.items():
        q = drafts[sequence_id].q(VOCAB)
        assert q is not None
        assert q.tolist() == rows
