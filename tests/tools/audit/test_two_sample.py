"""False alarms and power of the two-sample test."""

import random
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core.errors import MissingDependency
from paceline.tools.audit.tests import compare, rank


def test_statistic_and_p_value() -> None:
    rng = np.random.default_rng(0)
    for shift in (0.0, 0.05, 0.2):
        one, other = rng.random(400), np.clip(rng.random(300) + shift, 0, 1)
        found, known = compare(list(one), list(other)), stats.ks_2samp(one, other, method="asymp")
        assert found.distance == pytest.approx(known.statistic)
        assert found.p_value == pytest.approx(known.pvalue, rel=0.35, abs=1e-4)


def test_false_alarms_are_as_rare_as_stated() -> None:
    """1,500 pairs of one distribution: 1.5 alarms are expected; more than 7 have probability 1/4,000."""
    rng = np.random.default_rng(1)
    alarms = sum(compare(list(rng.random(60)), list(rng.random(60))).is_different for _ in range(1500))
    assert alarms <= 7


def test_detectable_difference_is_found() -> None:
    """A share `detectable` of one sample is moved to rank 0, which is the distance of the distributions."""
    rng = np.random.default_rng(2)
    size, missed = 400, 0
    wanted = compare([0.5] * size, [0.5] * size).detectable
    for _ in range(300):
        one = np.where(rng.random(size) < wanted, 0.0, rng.random(size))
        missed += not compare(list(one), list(rng.random(size))).is_different
    assert wanted < 0.3
    assert missed <= 3


def test_small_samples_detect_nothing() -> None:
    assert compare([0.1] * 5, [0.2] * 5).detectable > 1.0
    assert compare([], [0.5]).p_value == 1.0
    assert compare([], [0.5]).detectable == float("inf")


def test_ranks_of_sampled_tokens_are_uniform() -> None:
    rng = random.Random(0)
    probs = torch.tensor([0.05, 0.3, 0.3, 0.25, 0.1], dtype=torch.float64)  # two of them equal
    draws = rng.choices(range(5), weights=probs.tolist(), k=4000)
    ranks = [rank(probs, token, rng) for token in draws]
    assert stats.kstest(ranks, "uniform").pvalue > 0.01
    others = rng.choices(range(5), weights=(probs**2).tolist(), k=4000)  # half the temperature
    assert compare(ranks, [rank(probs, token, rng) for token in others]).is_different


def test_missing_scipy_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingDependency, match=r"pip install 'paceline\[bench\]'"):
        compare([0.1], [0.2])
