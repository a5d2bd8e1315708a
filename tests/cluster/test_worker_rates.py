import pytest

from paceline.cluster.worker_rates import (
    LEAST_TOKENS,
    LOAD_SECONDS_PER_TOKEN,
    SECONDS_PER_REQUEST,
    SECONDS_PER_TOKEN,
    WorkerRates,
)


def test_assumed_until_measured() -> None:
    rates = WorkerRates()
    assert rates.prefill("a") == SECONDS_PER_TOKEN
    assert rates.stay("a") == SECONDS_PER_REQUEST
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"] > rates.load("host") > rates.load("device") == 0


def test_each_worker_has_its_own_and_new_ones_are_like_the_others() -> None:
    rates = WorkerRates()
    rates.prefilled("a", 1000, 1.0)
    rates.prefilled("b", 1000, 3.0)
    rates.stayed("a", 4.0)
    assert rates.prefill("a") == pytest.approx(1e-3)
    assert rates.prefill("b") == pytest.approx(3e-3)
    assert 1e-3 < rates.prefill("c") < 3e-3
    assert rates.stay("a") == rates.stay("c") == 4.0


def test_what_changed_is_learned() -> None:
    rates = WorkerRates()
    for _ in range(50):
        rates.prefilled("a", 1000, 1.0)
    for _ in range(50):
        rates.prefilled("a", 1000, 2.0)
    assert rates.prefill("a") == pytest.approx(2e-3, rel=0.02)


def test_a_short_prefill_says_nothing() -> None:
    rates = WorkerRates()
    rates.prefilled("a", LEAST_TOKENS - 1, 10.0)
    assert rates.prefill("a") == SECONDS_PER_TOKEN


def test_loading_is_learned_by_tier() -> None:
    rates = WorkerRates()
    rates.loaded("host", 1000, 0.5)
    assert rates.load("host") == pytest.approx(5e-4)
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"]


def test_a_forgotten_worker_is_like_the_others_again() -> None:
    rates = WorkerRates()
    rates.prefilled("a", 1000, 1.0)
    rates.prefilled("b", 1000, 9.0)
    rates.stayed("b", 1.0)
    rates.forget("b")
    assert rates.prefill("b") == rates.prefill("never seen")
