"""Allowances on a clock that a test holds."""

from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.server.auth.api_keys import ApiKey, KeyLimits
from paceline.server.auth.rate_limit import Allowance, RateLimits
from paceline.server.openai.errors import BadRequest, RateLimited


def limited(**limits: Any) -> tuple[RateLimits, VirtualClock, ApiKey]:
    clock = VirtualClock(1000.0)
    return RateLimits(clock.now), clock, ApiKey("ann", limits=KeyLimits(**limits))


def refused(limits: RateLimits, key: ApiKey, requests: int = 1, choices: int = 1, tokens: int = 1) -> int:
    with pytest.raises(RateLimited) as error:
        limits.check(key, requests, choices, tokens)
    assert error.value.headers == {"retry-after": str(error.value.retry_after)}
    return error.value.retry_after


def test_an_allowance_fills_up_to_a_minutes_worth() -> None:
    allowance = Allowance(60, now=0.0)
    allowance.take(60, 0.0)
    assert allowance.wait(1, 0.0) == 1.0
    assert allowance.wait(1, 1.0) == 0.0
    assert allowance.wait(30, 10.0) == 20.0
    assert allowance.wait(60, 1e6) == 0.0
    assert allowance.wait(61, 1e6) == 1.0


def test_requests_a_minute() -> None:
    limits, clock, key = limited(requests_per_minute=6)
    for _ in range(6):
        with limits.enter(key, 1, 1, 5):
            pass
    assert refused(limits, key) == 10
    clock.advance(9.5)
    assert refused(limits, key) == 1
    clock.advance(0.5)
    with limits.enter(key, 1, 1, 5):
        pass
    assert refused(limits, key) == 10


def test_prompts_are_paid_for_on_the_way_in_and_outputs_as_they_come() -> None:
    limits, clock, key = limited(tokens_per_minute=600)  # ten a second
    with limits.enter(key, 1, 1, 400) as account:
        assert refused(limits, key, tokens=300) == 10
        limits.spend(account, 300)  # 100 below zero
    assert refused(limits, key, tokens=1) == 11
    assert refused(limits, key, tokens=100) == 20
    clock.advance(20)
    limits.check(key, 1, 1, 100)


def test_choices_at_once() -> None:
    limits, _, key = limited(max_concurrent=3)
    with limits.enter(key, 1, 2, 1):
        limits.check(key, 1, 1)
        assert refused(limits, key, choices=2) == 1
        with limits.enter(key, 1, 1, 1):
            assert refused(limits, key) == 1
    limits.check(key, 1, 3)


def test_a_failure_inside_gives_the_seat_back() -> None:
    limits, _, key = limited(max_concurrent=1)
    with pytest.raises(KeyError), limits.enter(key, 1, 1, 1):
        raise KeyError
    limits.check(key, 1, 1)


def test_what_is_refused_takes_nothing() -> None:
    limits, _, key = limited(requests_per_minute=2, tokens_per_minute=100)
    with limits.enter(key, 1, 1, 90):
        pass
    for _ in range(5):
        with pytest.raises(RateLimited), limits.enter(key, 1, 1, 50):
            pass
    with limits.enter(key, 1, 1, 10):
        pass


@pytest.mark.parametrize(
    ("limit", "asked"),
    [
        ({"requests_per_minute": 2}, (3, 3, 1)),
        ({"max_concurrent": 2}, (1, 3, 1)),
        ({"tokens_per_minute": 10}, (1, 1, 11)),
    ],
)
def test_what_can_never_be_is_not_called_a_matter_of_time(limit: dict[str, int], asked: tuple[int, int, int]) -> None:
    limits, _, key = limited(**limit)
    with pytest.raises(BadRequest, match="more than this key is ever allowed"):
        limits.check(key, *asked)


def test_keys_do_not_share_and_no_limit_is_none() -> None:
    limits, _, ann = limited(requests_per_minute=1)
    ben, free = ApiKey("ben", limits=KeyLimits(requests_per_minute=1)), ApiKey("free")
    with limits.enter(ann, 1, 1, 1):
        limits.check(ben, 1, 1)
    for _ in range(100):
        with limits.enter(free, 100, 100, 10**9):
            pass


def test_new_limits_hold_at_once_and_what_runs_still_counts() -> None:
    limits, _, key = limited(max_concurrent=5, requests_per_minute=1)
    changed = ApiKey("ann", id=key.id, limits=KeyLimits(max_concurrent=2))
    with limits.enter(key, 1, 2, 1):
        refused(limits, changed)
    limits.check(changed, 1, 2)
