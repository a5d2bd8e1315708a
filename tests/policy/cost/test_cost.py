"""Against the exact values of the formulas, worked out by hand or published."""

import pytest

from paceline.core.errors import InvalidRequest
from paceline.policy.cost.cost import (
    Footprint,
    MethodCosts,
    TargetCosts,
    dollars_per_million,
    estimate,
    estimates_by_depth,
    kv_bytes,
    plain,
    speculative_slots,
)
from paceline.policy.cost.speculation import expected_tokens

MS = 1e-3
FLAT = TargetCosts({1: 15 * MS})


def draft(alpha: float | tuple[float, ...], per_token: float = 2 * MS, network: float = 0.5 * MS) -> MethodCosts:
    alphas = alpha if isinstance(alpha, tuple) else (alpha,)
    return MethodCosts("draft_model", alphas, {0: 0.0, 32: 32 * per_token}, network)


@pytest.mark.parametrize(("alpha", "depth", "speedup"), [(0.7, 4, 1.77), (0.8, 5, 2.17), (0.9, 8, 2.92)])
def test_the_best_depth(alpha: float, depth: int, speedup: float) -> None:
    best = max(estimates_by_depth(FLAT, draft(alpha), 16), key=lambda one: one.speedup)
    assert (best.depth, round(best.speedup, 2)) == (depth, speedup)


def test_speedup_with_a_slower_verify_pass() -> None:
    target = TargetCosts({8: 12 * MS, 48: 20 * MS}, batch=8)  # K = 5 verifies 48 rows
    one = estimate(target, draft(0.8), 5)
    assert one.verify_seconds == pytest.approx(20 * MS)
    assert one.speedup == pytest.approx(expected_tokens((0.8,), 5) * 12 / (5 * 2 + 20 + 0.5))
    assert one.tokens_per_second == pytest.approx(8 * one.tokens / (30.5 * MS))
    assert plain(target).speedup == 1.0
    assert plain(target).tokens_per_second == pytest.approx(8 / (12 * MS))


def test_method_with_drafts_in_half_the_rounds() -> None:
    target = TargetCosts({1: 10 * MS, 4: 13 * MS})
    one = estimate(target, MethodCosts("ngram", (0.5,), {1: 0.0}, delivery=0.5), 3)
    assert one.tokens == pytest.approx(1 + 0.5 * (0.5 + 0.25 + 0.125))
    assert one.round_seconds == pytest.approx(11.5 * MS)


def test_trees_use_measured_depths_only() -> None:
    tree = MethodCosts("eagle", (0.9,), {8: 1 * MS, 32: 3 * MS}, tokens={8: 2.2, 32: 2.8})
    found = estimates_by_depth(FLAT, tree, 32)
    assert [(one.depth, one.tokens) for one in found] == [(8, 2.2), (32, 2.8)]
    assert found[1].speedup == pytest.approx(2.8 * 15 / 18)
    assert [one.depth for one in estimates_by_depth(FLAT, tree, 16)] == [8]
    growing = TargetCosts({1: 10 * MS, 9: 18 * MS})
    short = MethodCosts("suffix", (0.9,), {8: 0.0}, tokens={8: 2.0}, nodes={8: 3.0})
    assert estimate(growing, short, 8).verify_seconds == pytest.approx(13 * MS)  # four rows, not nine


def test_dollars_per_million_tokens() -> None:
    assert round(dollars_per_million(2.69, 50), 2) == 14.94
    assert round(dollars_per_million(2.69, 125), 2) == 5.98
    target = TargetCosts({1: 0.02}, price_per_hour=2.69)
    assert plain(target).dollars_per_million == pytest.approx(14.94, abs=0.005)
    pool = MethodCosts("pool", (1.0,), {1: 0.0}, price_per_hour=2.69)
    # twice the tokens for twice the money
    assert estimate(target, pool, 1).dollars_per_million == pytest.approx(plain(target).dollars_per_million)
    assert plain(FLAT).dollars_per_million is None


def test_memory_of_caches_and_draft_slots() -> None:
    assert kv_bytes(80, 8, 128, 4096, 2) == pytest.approx(1.34e9, rel=0.005)
    assert speculative_slots(5, 256) == 1280
    per_token = kv_bytes(80, 8, 128, 1, 2)
    assert 1280 * per_token == pytest.approx(419e6, rel=0.005)
    target = TargetCosts({1: 0.01}, 256, Footprint(140_000, per_token, 7), kv_tokens=1000)
    guest = MethodCosts("draft_model", (0.8,), {1: 0.0}, footprint=Footprint(2_600, 10))
    assert plain(target).memory_bytes == 140_007 + 1000 * per_token
    assert estimate(target, guest, 5).memory_bytes == 142_607 + 2280 * (per_token + 10)
    elsewhere = MethodCosts("pool", (0.8,), {1: 0.0}, footprint=Footprint(2_600, 10), price_per_hour=1.0)
    assert estimate(target, elsewhere, 5).memory_bytes == 140_007 + 2280 * per_token


def test_method_that_does_not_fit_the_device() -> None:
    target = TargetCosts({1: 0.01}, footprint=Footprint(70), memory_bytes=80)
    assert estimate(target, MethodCosts("head", (0.8,), {1: 0.0}, footprint=Footprint(10)), 4).fits
    assert not estimate(target, MethodCosts("draft_model", (0.8,), {1: 0.0}, footprint=Footprint(11)), 4).fits


def test_invalid_figures_are_rejected() -> None:
    with pytest.raises(InvalidRequest, match="alpha"):
        draft(1.2)
    with pytest.raises(InvalidRequest, match="negative"):
        MethodCosts("x", (0.5,), {1: -1.0})
    with pytest.raises(InvalidRequest, match="delivery"):
        MethodCosts("x", (0.5,), {1: 1.0}, delivery=0.0)
    with pytest.raises(InvalidRequest, match="above 0"):
        TargetCosts({})
    with pytest.raises(InvalidRequest, match="batch"):
        TargetCosts({1: 1.0}, batch=0)
