"""Lookahead decoding: the pool of n-grams, the Jacobi window, and the proposer."""

from collections.abc import Sequence

import pytest

from paceline.core.request import SamplingParams
from paceline.speculation.drafts.drafts import Draft, DraftTree, depths
from paceline.speculation.proposer import SequenceProgress
from paceline.speculation.proposers.lookahead import JacobiWindow, LookaheadProposer, NgramPool
from tests.speculation.proposers.test_ngram import Untouchable

# --- the pool


def test_the_latest_ngram_comes_first_without_duplicates() -> None:
    pool = NgramPool()
    for ngram in ((1, 2, 3), (1, 4, 5), (9, 9, 9), (1, 2, 3)):
        pool.add(ngram)
    assert pool.after(1) == [(2, 3), (4, 5)]
    assert pool.after(2) == []
    assert len(pool) == 3


def test_the_pool_is_bounded() -> None:
    pool = NgramPool(per_key=2, max_keys=3)
    for first in range(5):
        for other in range(4):
            pool.add((first, other))
    assert len(pool) == 6
    assert pool.after(4) == [(3,), (2,)]
    assert pool.after(0) == []
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="per_key >= 1"):
            NgramPool(*sizes)


# --- the window


def successor(token: int) -> int:
    """The token that the target picks after `token`."""
    return (3 * token + 1) % 17


def test_diagonals_are_ngrams_of_the_target() -> None:
    window, start, found = JacobiWindow(3), 5, []
    guesses = [8, 8, 8, 8, 8]
    for turn in range(8):
        found += window.advance(start, guesses, [successor(token) for token in guesses])
        start += 1 + turn % 2
        guesses = [*window.guesses(start), 0, 0][:5]
    assert found
    assert all(successor(a) == b and successor(b) == c for a, b, c in found)


def test_picks_are_the_guesses_of_the_next_position() -> None:
    window = JacobiWindow(2)
    assert window.guesses(0) == []
    assert window.advance(10, [1, 2, 3], [4, 5, 6]) == [(1, 4), (2, 5), (3, 6)]
    assert window.guesses(11) == [4, 5, 6]
    assert window.guesses(12) == [5, 6]
    assert window.guesses(10) == []


def test_a_diagonal_needs_all_its_rounds() -> None:
    window = JacobiWindow(3)
    assert window.advance(0, [1, 2], [3, 4]) == []
    # 9 only fills the window: it is no pick, so that (…, 9, 8) is no diagonal
    assert window.advance(1, [3, 4, 9], [6, 7, 8]) == [(1, 3, 6), (2, 4, 7)]
    with pytest.raises(ValueError, match="at least 2"):
        JacobiWindow(1)


# --- the proposer

TEXT = [(7 * i * i + 3) % 9973 for i in range(400)]
"""A text in which few tokens repeat."""


def picks(ids: Sequence[int], found: Draft) -> list[int]:
    """Picks of a target that always continues `TEXT`, whatever was drafted before."""
    return [TEXT[len(ids)], *(TEXT[len(ids) + level] for level in depths(found.parents))]


def draft(
    proposer: LookaheadProposer, ids: Sequence[int], depth: int, sequence_id: int = 0, picked: Sequence[int] = ()
) -> Draft:
    proposer.observe([SequenceProgress(sequence_id, ids, depth, SamplingParams(), 0, 0, 1, "coupled", picks=picked)])
    return proposer.collect([sequence_id], 0.0).split().get(sequence_id, Draft())


def commit(ids: list[int], found: Draft) -> int:
    """Append the accepted tokens of a draft and the next one. Returns the number of accepted tokens."""
    accepted = DraftTree(found.tokens, found.parents).num_matched(TEXT[len(ids) :])
    ids += TEXT[len(ids) : len(ids) + accepted + 1]
    return accepted


def rounds(proposer: LookaheadProposer, count: int, has_picks: bool, depth: int = 12) -> tuple[int, int]:
    """(accepted, drafted) over `count` rounds."""
    ids = TEXT[:3]
    accepted = drafted = 0
    picked: list[int] = []
    for _ in range(count):
        found = draft(proposer, ids, depth, picked=picked)
        assert len(found) <= depth
        if has_picks:
            picked = picks(ids, found)
        drafted += len(found)
        accepted += commit(ids, found)
    return accepted, drafted


def test_corrections_make_new_text_predictable() -> None:
    """Nothing repeats: only the target's corrections can give n-grams."""
    accepted, _ = rounds(LookaheadProposer(), 30, has_picks=True)
    assert accepted > 30


def test_without_corrections_there_is_no_window() -> None:
    assert rounds(LookaheadProposer(), 30, has_picks=False) == (0, 0)


def test_repeated_text_is_drafted_from_the_pool() -> None:
    found = draft(LookaheadProposer(ngram=4), [1, 2, 3, 4, 9, 1], 8)
    assert found.tokens == (2, 3, 4)


def test_candidates_share_their_prefix() -> None:
    found = draft(LookaheadProposer(ngram=3), [1, 2, 3, 1, 2, 4, 1, 5, 6, 1], 8)
    assert (found.tokens, found.parents) == ((5, 6, 2, 4, 3), (-1, 0, -1, 2, 2))


def test_the_window_takes_at_most_half_of_the_depth() -> None:
    proposer, ids = LookaheadProposer(window=8), [1, 2, 3, 1, 4, 5, 1]
    draft(proposer, ids, 8)
    with_window = draft(proposer, ids, 8, picked=[0])
    assert len(with_window) <= 8
    without = draft(LookaheadProposer(window=8), ids, 8)
    assert 0 < len(with_window) - len(without) <= 4
    assert draft(proposer, ids, 1).tokens == without.tokens[:1]


def test_a_pruned_draft_is_corrected_in_part() -> None:
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


def test_depth_zero_does_not_read_the_text() -> None:
    assert len(draft(LookaheadProposer(), Untouchable([1, 2, 1, 2]), 0)) == 0


def test_sequences_are_separate() -> None:
    proposer = LookaheadProposer(ngram=3)
    draft(proposer, [1, 2, 3, 4, 1], 4, sequence_id=1)
    assert len(draft(proposer, [7, 8, 9, 1], 4, sequence_id=2)) == 0


def test_invalid_sizes_are_rejected() -> None:
    for sizes in ((1, 4), (3, 0)):
        with pytest.raises(ValueError, match="ngram"):
            LookaheadProposer(*sizes)
