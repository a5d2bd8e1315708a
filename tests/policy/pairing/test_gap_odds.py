"""Probability of agreement by score gap, learned from planted odds."""

import math
import random

import pytest

from paceline.core.errors import InvalidConfig
from paceline.policy.pairing.outcomes import EDGES, ScoreGapAcceptance


def learned(odds_of, gaps, rounds=3000, depth=4, window=512.0):
    """Odds after rounds in which the target agrees with a token of gap g with probability `odds_of(g)`."""
    chance, odds = random.Random(1), ScoreGapAcceptance(window)
    agreed = tested = 0
    for _ in range(rounds):
        drawn = [chance.choice(gaps) for _ in range(depth)]
        accepted = next((i for i, gap in enumerate(drawn) if chance.random() >= odds_of(gap)), depth)
        odds.observe(drawn, accepted)
        agreed, tested = agreed + accepted, tested + min(depth, accepted + 1)
    return odds, agreed / tested


def test_converges_on_planted_odds():
    planted = {0.1: 0.45, 0.7: 0.7, 3.0: 0.95}
    odds, mean = learned(planted.__getitem__, list(planted))
    for gap, probability in planted.items():
        assert odds.alpha(mean, gap) == pytest.approx(probability, abs=0.06)


def test_follows_a_draft_that_becomes_worse():
    odds, mean = learned(lambda gap: 0.9, [0.1, 3.0])
    assert odds.alpha(mean, 0.1) == pytest.approx(0.9, abs=0.05)
    for _ in range(2000):
        odds.observe([0.1], 0)
        odds.observe([3.0], 1)
    assert odds.alpha(0.5, 0.1) < 0.1
    assert odds.alpha(0.5, 3.0) > 0.9


@pytest.mark.parametrize("average", [0.0, 0.3, 0.7, 1.0])
def test_average_without_evidence_or_gap(average):
    odds = ScoreGapAcceptance()
    assert odds.alpha(average, 0.1) == average
    odds.observe([], 0)
    odds.observe([None, math.nan], 1)
    assert odds.alpha(average, 0.1) == average
    odds, _ = learned(lambda gap: 0.2 + 0.2 * gap, [0.1, 3.0])
    assert odds.alpha(average, None) == odds.alpha(average, math.nan) == average


def test_equal_gaps_leave_the_average():
    odds, _ = learned(lambda gap: 0.6, [0.7])
    assert [odds.alpha(average, 0.7) for average in (0.2, 0.5, 0.9)] == [0.2, 0.5, 0.9]


def test_little_evidence_moves_little():
    odds, mean = learned(lambda gap: 0.7, [3.0])
    odds.observe([0.1], 0)
    assert mean - 0.2 < odds.alpha(mean, 0.1) < mean


@pytest.mark.parametrize("gap", [math.inf, -math.inf, math.nan, 0.0, -1.0, 1e300])
def test_any_gap_gives_a_probability(gap):
    odds, mean = learned(lambda gap: 0.5, [0.01, 1.0, 99.0], rounds=200)
    for accepted in (0, 1, 2):
        odds.observe([gap, 1.0], accepted)
    for average in (0.0, mean, 1.0):
        assert 0.0 <= odds.alpha(average, gap) <= 1.0


def test_infinite_gaps_are_the_largest():
    odds, mean = learned(lambda gap: 0.9 if gap > 1.0 else 0.4, [0.1, math.inf])
    assert odds.alpha(mean, math.inf) == odds.alpha(mean, EDGES[-1] + 1.0) > odds.alpha(mean, -math.inf)


def test_only_tested_tokens_count():
    one, other = ScoreGapAcceptance(), ScoreGapAcceptance()
    one.observe([0.1, 3.0], 1)
    other.observe([0.1, 3.0, 0.1, 0.1], 1)
    assert one.alpha(0.7, 0.1) == other.alpha(0.7, 0.1)


def test_window_must_hold_rounds():
    with pytest.raises(InvalidConfig):
        ScoreGapAcceptance(1.0)
