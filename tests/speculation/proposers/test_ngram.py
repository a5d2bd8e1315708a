import random
from collections.abc import Sequence

import pytest

from paceline.core.request import SamplingParams
from paceline.speculation.proposer import Proposer, SequenceProgress
from paceline.speculation.proposers.suffix import NgramProposer


def progress(ids: Sequence[int], depth: int, sequence_id: int = 0) -> SequenceProgress:
    return SequenceProgress(sequence_id, ids, depth, SamplingParams(), 0, 0, 1, "coupled")


def draft(proposer: Proposer, ids: Sequence[int], depth: int, sequence_id: int = 0) -> list[int]:
    proposer.observe([progress(ids, depth, sequence_id)])
    found = proposer.collect([sequence_id], deadline=0.0).split().get(sequence_id)
    if found is None:
        return []
    assert found.is_chain
    assert found.probs is None
    return list(found.tokens)


def scan(ids: Sequence[int], depth: int, min_ngram: int, max_ngram: int) -> list[int]:
    """The reference by a full scan: the longest suffix at its latest earlier position."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if list(ids[start : start + size]) == list(ids[-size:]):
                text = list(ids)
                for i in range(start + size, start + size + depth):
                    text.append(text[i])
                return text[len(ids) :]
    return []


def test_drafts_what_followed_the_last_occurrence() -> None:
    assert draft(NgramProposer(), [1, 2, 3, 4, 5, 9, 1, 2], 3) == [3, 4, 5]


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert draft(NgramProposer(), [1, 2, 3, 4, 8, 3, 4, 9, 1, 2, 3, 4], 1) == [8]


def test_of_equal_matches_the_latest_wins() -> None:
    assert draft(NgramProposer(), [1, 2, 7, 1, 2, 8, 5, 1, 2], 1) == [8]


def test_a_loop_is_repeated() -> None:
    assert draft(NgramProposer(), [5, 6, 7, 5, 6, 7, 5, 6], 8) == [7, 5, 6, 7, 5, 6, 7, 5]
    assert draft(NgramProposer(), [4, 4, 4], 6) == [4] * 6


@pytest.mark.parametrize("ids", [[1], [1, 2], [1, 2, 3, 4, 5], [1, 1], [1, 2, 3, 1]])
def test_a_suffix_never_matches_itself(ids: list[int]) -> None:
    assert draft(NgramProposer(), ids, 4) == []


def test_matches_have_at_least_min_ngram_tokens() -> None:
    assert draft(NgramProposer(min_ngram=1), [1, 2, 3, 1], 2) == [2, 3]
    assert draft(NgramProposer(min_ngram=3, max_ngram=3), [1, 2, 9, 1, 2], 2) == []
    for sizes in ((0, 2), (3, 2)):
        with pytest.raises(ValueError, match="min_ngram"):
            NgramProposer(*sizes)


class Untouchable(list[int]):
    """Ids that must not be read."""

    def __getitem__(self, index: object) -> int:  # type: ignore[override]
        raise AssertionError("read at depth 0")

    def __iter__(self):  # type: ignore[no-untyped-def]
        raise AssertionError("read at depth 0")


def test_depth_zero_does_not_read_the_text() -> None:
    assert draft(NgramProposer(), Untouchable([1, 2, 1, 2]), 0) == []


def test_tokens_observed_at_depth_zero_are_found_later() -> None:
    proposer, ids = NgramProposer(), [1, 2, 3]
    assert draft(proposer, ids, 0) == []
    ids += [4, 5, 1, 2]
    assert draft(proposer, ids, 0) == []
    ids += [3]
    assert draft(proposer, ids, 2) == [4, 5]


def test_sequences_are_separate_and_end_with_close() -> None:
    proposer = NgramProposer()
    assert draft(proposer, [1, 2, 3, 1, 2], 1, sequence_id=1) == [3]
    assert draft(proposer, [7, 7, 1, 2], 1, sequence_id=2) == []
    proposer.close([1, 99])
    assert proposer.collect([1], 0.0).sequence_ids == ()
    assert draft(proposer, [1, 2], 1, sequence_id=1) == []


def test_only_requested_sequences_are_drafted_for() -> None:
    proposer = NgramProposer()
    proposer.observe([progress([1, 2, 3, 1, 2], 2, i) for i in range(4)])
    assert proposer.collect([2, 0, 7], 0.0).sequence_ids == (2, 0)


@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_a_full_scan_as_the_text_grows(seed: int) -> None:
    rng = random.Random(seed)
    low = rng.randint(1, 2)
    high = low + rng.randint(0, 2)
    proposer = NgramProposer(low, high)
    ids = [rng.randrange(4)]
    found = 0
    for _ in range(120):
        depth = rng.choice((0, 0, 1, 3, 7))
        expected = scan(ids, depth, low, high) if depth else []
        assert draft(proposer, ids, depth) == expected
        found += bool(expected)
        ids += [rng.randrange(4) for _ in range(rng.randint(1, 4))]
    assert found > 20
