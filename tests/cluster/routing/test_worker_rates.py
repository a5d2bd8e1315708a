import pytest

from paceline.cluster.routing.worker_rates import (
    HALF_LIFE,
    LEAST_TOKENS,
    LOAD_SECONDS_PER_TOKEN,
    SECONDS_PER_REQUEST,
    SECONDS_PER_TOKEN,
    WorkerRates,
)

NOW = 500.0


def test_assumed_until_measured() -> None:
    rates = WorkerRates()
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN
    assert rates.stay("a") == SECONDS_PER_REQUEST
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"] > rates.load("host") > rates.load("device") == 0


def test_each_worker_has_its_own_and_new_ones_are_like_the_others() -> None:
    rates = WorkerRates()
    rates.prefilled("a", 1000, 1.0, NOW)
    rates.prefilled("b", 1000, 3.0, NOW)
    rates.stayed("a", 4.0)
    assert rates.prefill("a", NOW) == pytest.approx(1e-3)
    assert rates.prefill("b", NOW) == pytest.approx(3e-3)
    assert 1e-3 < rates.prefill("c", NOW) < 3e-3
    assert rates.stay("a") == rates.stay("c") == 4.0


def test_what_changed_is_learned() -> None:
    rates = WorkerRates()
    for _ in range(50):
        rates.prefilled("a", 1000, 1.0, NOW)
    for _ in range(50):
        rates.prefilled("a", 1000, 2.0, NOW)
    assert rates.prefill("a", NOW) == pytest.approx(2e-3, rel=0.02)


def test_a_short_prefill_says_nothing() -> None:
    rates = WorkerRates()
    rates.prefilled("a", LEAST_TOKENS - 1, 10.0, NOW)
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN


def test_loading_is_learned_by_tier() -> None:
    rates = WorkerRates()
    rates.loaded("host", 1000, 0.5)
    assert rates.load("host") == pytest.approx(5e-4)
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"]


def test_what_peers_give_is_learned() -> None:
    rates = WorkerRates()
    assert rates.peer() is None
    rates.fetched(1000, 0.5)
    assert rates.peer() == pytest.approx(5e-4)


def test_a_forgotten_worker_is_like_the_others_again() -> None:
    rates = WorkerRates()
    rates.prefilled("a", 1000, 1.0, NOW)
    rates.prefilled("b", 1000, 9.0, NOW)
    rates.stayed("b", 1.0)
    rates.forget("b")
    assert rates.prefill("b", NOW) == rates.prefill("never seen", NOW)


def test_what_sets_a_worker_apart_is_forgotten_by_and_by() -> None:
    """Or one that was slow once, as the first of all is, would never get the chance to show that it is not."""
    rates = WorkerRates()
    rates.prefilled("slow once", 1000, 9.0, NOW)
    for _ in range(50):
        rates.prefilled("a", 1000, 1.0, NOW)
    common = rates.prefill("never seen", NOW)
    assert rates.prefill("slow once", NOW) == pytest.approx(9e-3)
    assert rates.prefill("slow once", NOW + HALF_LIFE) == pytest.approx((9e-3 + common) / 2)
    assert rates.prefill("slow once", NOW + 20 * HALF_LIFE) == pytest.approx(common, rel=1e-4)


def test_what_is_under_way_bounds_what_is_assumed_until_something_is_measured() -> None:
    rates = WorkerRates()
    rates.suppose(SECONDS_PER_TOKEN / 2)
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN
    rates.suppose(5e-3)
    rates.suppose(4e-3)
    assert rates.prefill("a", NOW) == 5e-3
    rates.prefilled("a", 1000, 1.0, NOW)
    assert rates.prefill("a", NOW) == rates.prefill("b", NOW) == pytest.approx(1e-3)
