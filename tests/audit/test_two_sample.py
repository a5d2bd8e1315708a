"""How often the test raises a false alarm, and that what it promises to find it finds."""

import random

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.audit.two_sample import LEVEL, compare, rank


def test_the_p_value_is_kolmogorovs() -> None:
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.05, 0.2):
        one, other = rng.random(400), np.clip(rng.random(300) + shift, 0, 1)
        found, known = compare(list(one), list(other)), stats.ks_2samp(one, other, method="asymp")
        assert found.distance == pytest.approx(known.statistic)
        assert found.p_value == pytest.approx(known.pvalue, rel=0.35, abs=1e-4)


def test_false_alarms_are_as_rare_as_stated() -> None:
    """4,000 pairs of the same law: 4 alarms are expected, and more than 12 would come once in 4,000 runs of other seeds."""
    rng = np.random.default_rng(1)
    alarms = sum(compare(list(rng.random(60)), list(rng.random(60))).is_different for _ in range(4000))
    assert alarms <= 4000 * LEVEL + 8


def test_a_detectable_difference_is_detected() -> None:
    """A share `detectable` of one law's tokens moved to the top rank: the distance between the laws is just that."""
    rng = np.random.default_rng(2)
    size, missed = 400, 0
    wanted = compare([0.5] * size, [0.5] * size).detectable
    for _ in range(300):
        one = np.where(rng.random(size) < wanted, 0.0, rng.random(size))
        missed += not compare(list(one), list(rng.random(size))).is_different
    assert wanted < 0.3
    assert missed <= 3


def test_too_few_tokens_promise_nothing() -> None:
    assert compare([0.1] * 5, [0.2] * 5).detectable > 1.0
    assert compare([], [0.5]).p_value == 1.0
    assert compare([], [0.5]).detectable == float("inf")


def test_ranks_of_drawn_tokens_are_uniform() -> None:
    rng = random.Random(0)
    law = torch.tensor([0.05, 0.3, 0.3, 0.25, 0.1], dtype=torch.float64)  # two of them equal
    draws = rng.choices(range(5), weights=law.tolist(), k=4000)
    ranks = [rank(law, token, rng) for token in draws]
    assert stats.kstest(ranks, "uniform").pvalue > 0.01
    others = rng.choices(range(5), weights=(law**2).tolist(), k=4000)  # half the temperature
    assert compare(ranks, [rank(law, token, rng) for token in others]).is_different
