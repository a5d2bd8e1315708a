"""Rate limits with a virtual clock."""

from typing import Any

import pytest

from paceline.core.clock import VirtualClock
from paceline.gateway.api.errors import BadRequest, RateLimited
from paceline.gateway.auth.api_keys import ApiKey, KeyLimits
from paceline.gateway.auth.rate_limit import Allowance, RateLimits


def limited(**limits: Any) -> tuple[RateLimits, VirtualClock, ApiKey]:
    clock = VirtualClock(1000.0)
    return RateLimits(clock.now), clock, ApiKey("ann", limits=KeyLimits(**limits))


def retry_after(limits: RateLimits, key: ApiKey, requests: int = 1, choices: int = 1, tokens: int = 1) -> int:
    with pytest.raises(RateLimited) as error:
        limits.check(key, requests, choices, tokens)
    assert error.value.headers == {"retry-after": str(error.value.retry_after)}
    return error.value.retry_after


def test_an_allowance_refills_to_one_minutes_amount() -> None:
    allowance = Allowance(60, now=0.0)
    allowance.take(60, 0.0)
    assert allowance.wait_seconds(1, 0.0) == 1.0
    assert allowance.wait_seconds(1, 1.0) == 0.0
    assert allowance.wait_seconds(30, 10.0) == 20.0
    assert allowance.wait_seconds(60, 1e6) == 0.0
    assert allowance.wait_seconds(61, 1e6) == 1.0


def test_requests_per_minute() -> None:
    limits, clock, key = limited(requests_per_minute=6)
    for _ in range(6):
        with limits.take(key, 1, 1, 5):
            pass
    assert retry_after(limits, key) == 10
    clock.advance(9.5)
    assert retry_after(limits, key) == 1
    clock.advance(0.5)
    with limits.take(key, 1, 1, 5):
        pass
    assert retry_after(limits, key) == 10


def test_prompts_are_charged_on_admission_and_outputs_when_generated() -> None:
    limits, clock, key = limited(tokens_per_minute=600)  # ten a second
    with limits.take(key, 1, 1, 400) as account:
        assert retry_after(limits, key, tokens=300) == 10
        limits.spend(account, 300)  # 100 below zero
    assert retry_after(limits, key, tokens=1) == 11
    assert retry_after(limits, key, tokens=100) == 20
    clock.advance(20)
    limits.check(key, 1, 1, 100)


def test_concurrent_choices() -> None:
    limits, _, key = limited(max_concurrent=3)
    with limits.take(key, 1, 2, 1):
        limits.check(key, 1, 1)
        assert retry_after(limits, key, choices=2) == 1
        with limits.take(key, 1, 1, 1):
            assert retry_after(limits, key) == 1
    limits.check(key, 1, 3)


def test_an_error_releases_the_choices() -> None:
    limits, _, key = limited(max_concurrent=1)
    with pytest.raises(KeyError), limits.take(key, 1, 1, 1):
        raise KeyError
    limits.check(key, 1, 1)


def test_a_rejected_request_is_not_charged() -> None:
    limits, _, key = limited(requests_per_minute=2, tokens_per_minute=100)
    with limits.take(key, 1, 1, 90):
        pass
    for _ in range(5):
        with pytest.raises(RateLimited), limits.take(key, 1, 1, 50):
            pass
    with limits.take(key, 1, 1, 10):
        pass


@pytest.mark.parametrize(
    ("limit", "amounts"),
    [
        ({"requests_per_minute": 2}, (3, 3, 1)),
        ({"max_concurrent": 2}, (1, 3, 1)),
        ({"tokens_per_minute": 10}, (1, 1, 11)),
    ],
)
def test_a_request_above_the_limit_is_a_bad_request(limit: dict[str, int], amounts: tuple[int, int, int]) -> None:
    limits, _, key = limited(**limit)
    with pytest.raises(BadRequest, match="exceed the limit of this key"):
        limits.check(key, *amounts)


def test_keys_have_separate_limits_and_none_means_no_limit() -> None:
    limits, _, ann = limited(requests_per_minute=1)
    ben, free = ApiKey("ben", limits=KeyLimits(requests_per_minute=1)), ApiKey("free")
    with limits.take(ann, 1, 1, 1):
        limits.check(ben, 1, 1)
    for _ in range(100):
        with limits.take(free, 100, 100, 10**9):
            pass


def test_new_limits_apply_at_once_and_running_choices_count() -> None:
    limits, _, key = limited(max_concurrent=5, requests_per_minute=1)
    changed = ApiKey("ann", id=key.id, limits=KeyLimits(max_concurrent=2))
    with limits.take(key, 1, 2, 1):
        retry_after(limits, changed)
    limits.check(changed, 1, 2)


def test_each_gateway_enforces_its_share() -> None:
    limits = KeyLimits(requests_per_minute=4, max_concurrent=1)
    key, clock = ApiKey("shared", limits=limits), VirtualClock()
    shared = RateLimits(clock.now, num_gateways=2)
    for _ in range(2):
        with shared.take(key, 1, 1, 1):
            pass
    with pytest.raises(RateLimited, match="2 requests per minute"), shared.take(key, 1, 1, 1):
        pass
