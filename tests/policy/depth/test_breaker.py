"""The states of the breaker; healthy traffic does not open it."""

import random

import pytest

from paceline.core.errors import InvalidConfig
from paceline.core.status import BreakerState
from paceline.policy.depth.breaker import UNLIMITED, Breaker, BreakerRule
from tests.traffic import CHAT, CODE

QUICK = BreakerRule(threshold=0.5, window=2, cooldown=10.0, max_cooldown=35.0)


def rounds(breaker: Breaker, count: int, accepted: int, now: float, drafted: int = 4) -> None:
    for _ in range(count):
        breaker.record(CHAT, drafted, accepted, now)


def test_opens_after_three_lossy_windows_in_a_row() -> None:
    breaker = Breaker(QUICK)
    rounds(breaker, 5, 0, now=0.0)
    assert breaker.allow(CHAT, 0.0) == UNLIMITED
    rounds(breaker, 1, 0, now=0.0)
    assert breaker.state(CHAT) is BreakerState.OPEN
    assert breaker.allow(CHAT, 9.9) == 0
    assert breaker.allow(CODE, 9.9) == UNLIMITED


def test_a_good_window_resets_the_count() -> None:
    breaker = Breaker(QUICK)
    for _ in range(5):
        rounds(breaker, 4, 0, now=0.0)
        rounds(breaker, 2, 4, now=0.0)
    assert breaker.state(CHAT) is BreakerState.CLOSED


def test_half_open_probes_then_closes() -> None:
    breaker = Breaker(QUICK)
    rounds(breaker, 6, 0, now=0.0)
    assert breaker.allow(CHAT, 10.0) == 1
    assert breaker.state(CHAT) is BreakerState.HALF_OPEN
    rounds(breaker, 2, 4, now=10.0)
    assert breaker.state(CHAT) is BreakerState.CLOSED
    rounds(breaker, 4, 0, now=11.0)
    assert breaker.state(CHAT) is BreakerState.CLOSED


def test_cool_down_doubles_up_to_its_cap_and_resets() -> None:
    breaker, now = Breaker(QUICK), 0.0
    rounds(breaker, 6, 0, now)
    for cooldown in (10.0, 20.0, 35.0, 35.0):
        assert breaker.allow(CHAT, now + cooldown - 0.1) == 0
        now += cooldown
        assert breaker.allow(CHAT, now) == 1
        rounds(breaker, 2, 0, now)
        assert breaker.state(CHAT) is BreakerState.OPEN
    now += 35.0
    breaker.allow(CHAT, now)
    rounds(breaker, 2, 4, now)
    rounds(breaker, 6, 0, now)
    assert breaker.allow(CHAT, now + 9.9) == 0
    assert breaker.allow(CHAT, now + 10.0) == 1


def test_rounds_still_in_flight_when_it_opened_are_ignored() -> None:
    breaker = Breaker(QUICK)
    rounds(breaker, 6, 0, now=0.0)
    rounds(breaker, 6, 4, now=1.0)
    assert breaker.state(CHAT) is BreakerState.OPEN
    assert breaker.allow(CHAT, 10.0) == 1


def test_measured_gain_overrules_acceptance() -> None:
    breaker = Breaker(QUICK)
    for _ in range(20):
        breaker.record(CHAT, 4, 0, 0.0, gain=1.05)
        breaker.record(CODE, 4, 4, 0.0, gain=0.95)
    assert breaker.state(CHAT) is BreakerState.CLOSED
    assert breaker.state(CODE) is BreakerState.OPEN


def test_declined_rounds_count_only_with_a_gain() -> None:
    breaker = Breaker(QUICK)
    for _ in range(6):
        breaker.record(CHAT, 0, 0, 0.0)
        breaker.record(CODE, 0, 0, 0.0, gain=0.8)
    assert breaker.state(CHAT) is BreakerState.CLOSED
    assert breaker.state(CODE) is BreakerState.OPEN


def sampled(breaker: Breaker, alpha: float, depth: int, count: int, seed: int) -> int | None:
    """The round at which the breaker opened."""
    dice = random.Random(seed)
    for i in range(1, count + 1):
        accepted = 0
        while accepted < depth and dice.random() < alpha:
            accepted += 1
        breaker.record(CHAT, depth, accepted, 0.0)
        if breaker.state(CHAT) is BreakerState.OPEN:
            return i
    return None


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_healthy_traffic_never_opens_it_and_bad_traffic_soon_does(depth: int) -> None:
    assert sampled(Breaker(), 0.7, depth, 20_000, seed=3) is None
    opened = sampled(Breaker(), 0.2, depth, 200, seed=3)
    assert opened is not None
    assert opened <= 96


def test_the_published_rule_opens_on_healthy_traffic() -> None:
    published = Breaker(BreakerRule(threshold=0.5, window=1, conditional=False))
    for accepted in (1, 1, 2, 1, 1):
        published.record(CHAT, 4, accepted, 0.0)
    assert published.state(CHAT) is BreakerState.CLOSED
    published.record(CHAT, 4, 1, 0.0)
    assert published.state(CHAT) is BreakerState.OPEN
    opened = sampled(Breaker(BreakerRule(threshold=0.5, window=1, conditional=False)), 0.7, 4, 1000, seed=4)
    assert opened is not None
    assert opened < 100


def test_invalid_rules_are_rejected() -> None:
    with pytest.raises(InvalidConfig, match="draft_acceptance_threshold"):
        BreakerRule(threshold=65)
    with pytest.raises(InvalidConfig, match="cooldown"):
        BreakerRule(cooldown=200.0)
