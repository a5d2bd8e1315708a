import pytest

from paceline.policy.routing.rates import (
    HALF_LIFE,
    LOAD_SECONDS_PER_TOKEN,
    MIN_TOKENS,
    SECONDS_PER_REQUEST,
    SECONDS_PER_TOKEN,
    WorkerRates,
)

NOW = 500.0


def test_defaults_before_the_first_measurement() -> None:
    rates = WorkerRates()
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN
    assert rates.duration("a") == SECONDS_PER_REQUEST
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"] > rates.load("host") > rates.load("device") == 0


def test_new_worker_gets_the_common_rate() -> None:
    rates = WorkerRates()
    rates.add_prefill("a", 1000, 1.0, NOW)
    rates.add_prefill("b", 1000, 3.0, NOW)
    rates.add_duration("a", 4.0)
    assert rates.prefill("a", NOW) == pytest.approx(1e-3)
    assert rates.prefill("b", NOW) == pytest.approx(3e-3)
    assert 1e-3 < rates.prefill("c", NOW) < 3e-3
    assert rates.duration("a") == rates.duration("c") == 4.0


def test_rate_follows_a_change() -> None:
    rates = WorkerRates()
    for _ in range(50):
        rates.add_prefill("a", 1000, 1.0, NOW)
    for _ in range(50):
        rates.add_prefill("a", 1000, 2.0, NOW)
    assert rates.prefill("a", NOW) == pytest.approx(2e-3, rel=0.02)


def test_short_prefill_is_not_measured() -> None:
    rates = WorkerRates()
    rates.add_prefill("a", MIN_TOKENS - 1, 10.0, NOW)
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN


def test_load_rate_is_measured_by_tier() -> None:
    rates = WorkerRates()
    rates.add_load("host", 1000, 0.5)
    assert rates.load("host") == pytest.approx(5e-4)
    assert rates.load("disk") == LOAD_SECONDS_PER_TOKEN["disk"]


def test_peer_rate_is_measured() -> None:
    rates = WorkerRates()
    assert rates.peer() is None
    rates.add_peer_fetch(1000, 0.5)
    assert rates.peer() == pytest.approx(5e-4)


def test_forgotten_worker_gets_the_common_rate() -> None:
    rates = WorkerRates()
    rates.add_prefill("a", 1000, 1.0, NOW)
    rates.add_prefill("b", 1000, 9.0, NOW)
    rates.add_duration("b", 1.0)
    rates.forget("b")
    assert rates.prefill("b", NOW) == rates.prefill("never seen", NOW)


def test_rate_of_an_idle_worker_returns_to_the_common_rate() -> None:
    """Otherwise a worker that was slow once would never be measured again."""
    rates = WorkerRates()
    rates.add_prefill("slow once", 1000, 9.0, NOW)
    for _ in range(50):
        rates.add_prefill("a", 1000, 1.0, NOW)
    common = rates.prefill("never seen", NOW)
    assert rates.prefill("slow once", NOW) == pytest.approx(9e-3)
    assert rates.prefill("slow once", NOW + HALF_LIFE) == pytest.approx((9e-3 + common) / 2)
    assert rates.prefill("slow once", NOW + 20 * HALF_LIFE) == pytest.approx(common, rel=1e-4)


def test_running_prefill_is_a_lower_bound_until_a_measurement() -> None:
    rates = WorkerRates()
    rates.set_lower_bound(SECONDS_PER_TOKEN / 2)
    assert rates.prefill("a", NOW) == SECONDS_PER_TOKEN
    rates.set_lower_bound(5e-3)
    rates.set_lower_bound(4e-3)
    assert rates.prefill("a", NOW) == 5e-3
    rates.add_prefill("a", 1000, 1.0, NOW)
    assert rates.prefill("a", NOW) == rates.prefill("b", NOW) == pytest.approx(1e-3)
