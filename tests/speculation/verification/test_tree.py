import pytest
import torch

from paceline.speculation.drafts.drafts import Draft, DraftProbs, depths
from paceline.speculation.verification.tree import MAX_NODES, InvalidDraft, ancestors, prune, validate

#      root
#     /    \
#    0      1
#   / \      \
#  2   3      4
#      |
#      5
PARENTS = (-1, -1, 0, 0, 1, 3)


def test_depths() -> None:
    assert depths(PARENTS) == [1, 1, 2, 2, 2, 3]
    assert depths(()) == []


def test_ancestors_are_the_path_from_the_root() -> None:
    seen = [[row for row in range(7) if mask >> row & 1] for mask in ancestors(PARENTS)]
    assert seen == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6]]


def test_the_masks_of_the_longest_chain_fit_a_signed_integer() -> None:
    masks = ancestors(tuple(range(-1, MAX_NODES - 1)))
    assert masks[-1] == -1
    assert torch.tensor(masks, dtype=torch.int64)[62].item() == 2**63 - 1


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft((1, 2), (-1, 1)), "parent precedes"),
        (Draft((1, 2), (-1, -2)), "parent precedes"),
        (Draft((1, 1), (-1, -1)), "siblings differ"),
        (Draft((1, 9), (-1, 0)), "vocabulary"),
        (Draft((1, -1), (-1, 0)), "vocabulary"),
        (Draft((1,) * 64, tuple(range(-1, 63))), "at most 63"),
        (Draft((1, 2), (-1, 0), DraftProbs(torch.ones(1, 9) / 9), slice(0, 2)), "distributions"),
        (Draft((1,), (-1,), DraftProbs(torch.ones(1, 8) / 8), slice(0, 1)), "columns"),
    ],
)
def test_an_invalid_draft_is_rejected(draft: Draft, message: str) -> None:
    with pytest.raises(InvalidDraft, match=message):
        validate(draft, 9)


def test_trees_are_valid() -> None:
    validate(Draft(), 9)
    validate(Draft((1, 2, 1, 2, 1, 1), PARENTS), 9)
    validate(Draft((1,) * 63, tuple(range(-1, 62))), 9)


def test_pruning_keeps_a_prefix_and_its_distributions() -> None:
    probs = DraftProbs(torch.arange(20.0).reshape(10, 2))
    draft = Draft((1, 2, 1, 2, 1, 1), PARENTS, probs, slice(3, 9))
    pruned = prune(draft, 4)
    assert (pruned.tokens, pruned.parents) == ((1, 2, 1, 2), (-1, -1, 0, 0))
    q = pruned.q(2)
    assert q is not None
    assert torch.equal(q, probs.probs[3:7])
    assert prune(draft, 6) is draft
    assert len(prune(draft, 0)) == 0
