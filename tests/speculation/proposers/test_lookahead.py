from collections.abc import Sequence

import pytest

from paceline.core.sampling import SamplingParams
from paceline.speculation.drafts import Draft
from paceline.speculation.proposer import Progress
from paceline.speculation.proposers.lookahead import LookaheadProposer
from paceline.speculation.trees.guess import Guess
from paceline.speculation.trees.tree import depths
from tests.speculation.proposers.test_ngram import Untouchable

TEXT = [(7 * i * i + 3) % 9973 for i in range(400)]
"""Hardly a token comes twice."""


def picks(ids: Sequence[int], found: Draft) -> list[int]:
    """Of a target that knows what is_pending where, whatever was guessed before."""
    return [TEXT[len(ids)], *(TEXT[len(ids) + level] for level in depths(found.parents))]


def draft(
    proposer: LookaheadProposer, ids: Sequence[int], depth: int, sequence_id: int = 0, picked: Sequence[int] = ()
) -> Draft:
    proposer.observe([Progress(sequence_id, ids, depth, SamplingParams(), 0, 0, 1, "coupled", picks=picked)])
    return proposer.collect([sequence_id], 0.0).split().get(sequence_id, Draft())


def commit(ids: list[int], found: Draft) -> int:
    """Append what the target accepts of a draft and the token that follows; how many were accepted."""
    accepted = Guess(found.tokens, found.parents).matched(TEXT[len(ids) :])
    ids += TEXT[len(ids) : len(ids) + accepted + 1]
    return accepted


def rounds(proposer: LookaheadProposer, count: int, hears: bool, depth: int = 12) -> tuple[int, int]:
    """(accepted, drafted) over `count` rounds."""
    ids = TEXT[:3]
    accepted = drafted = 0
    picked: list[int] = []
    for _ in range(count):
        found = draft(proposer, ids, depth, picked=picked)
        assert len(found) <= depth
        if hears:
            picked = picks(ids, found)
        drafted += len(found)
        accepted += commit(ids, found)
    return accepted, drafted


def test_corrections_make_new_text_predictable() -> None:
    """Nothing repeats, so only the target's corrections of wrong guesses can have taught it."""
    accepted, _ = rounds(LookaheadProposer(), 30, hears=True)
    assert accepted > 30


def test_without_corrections_there_are_no_rows_to_correct() -> None:
    assert rounds(LookaheadProposer(), 30, hears=False) == (0, 0)


def test_text_that_repeats_is_drafted_from_the_pool() -> None:
    found = draft(LookaheadProposer(ngram=4), [1, 2, 3, 4, 9, 1], 8)
    assert found.tokens == (2, 3, 4)


def test_candidates_share_their_prefix() -> None:
    found = draft(LookaheadProposer(ngram=3), [1, 2, 3, 1, 2, 4, 1, 5, 6, 1], 8)
    assert (found.tokens, found.parents) == ((5, 6, 2, 4, 3), (-1, 0, -1, 2, 2))


def test_the_window_takes_at_most_half() -> None:
    proposer, ids = LookaheadProposer(window=8), [1, 2, 3, 1, 4, 5, 1]
    draft(proposer, ids, 8)
    with_window = draft(proposer, ids, 8, picked=[0])
    assert len(with_window) <= 8
    without = draft(LookaheadProposer(window=8), ids, 8)
    assert 0 < len(with_window) - len(without) <= 4
    assert draft(proposer, ids, 1).tokens == without.tokens[:1]


def test_a_draft_cut_short_is_corrected_as_far_as_it_went() -> None:
    proposer, ids = LookaheadProposer(), TEXT[:3]
    accepted = 0
    picked: list[int] = []
    for _ in range(20):
        found = draft(proposer, ids, 12, picked=picked)
        picked = picks(ids, found)[:3]
        accepted += commit(ids, found)
    assert accepted > 0
    proposer.close([0, 0])
    assert proposer.collect([0], 0.0).sequence_ids == ()


def test_depth_zero_costs_nothing() -> None:
    assert len(draft(LookaheadProposer(), Untouchable([1, 2, 1, 2]), 0)) == 0


def test_sequences_do_not_mix() -> None:
    proposer = LookaheadProposer(ngram=3)
    draft(proposer, [1, 2, 3, 4, 1], 4, sequence_id=1)
    assert len(draft(proposer, [7, 8, 9, 1], 4, sequence_id=2)) == 0


def test_sizes_are_checked() -> None:
    for sizes in ((1, 4), (3, 0)):
        with pytest.raises(ValueError, match="ngram"):
            LookaheadProposer(*sizes)
