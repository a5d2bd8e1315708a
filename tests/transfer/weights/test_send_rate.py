"""The rate of sending weights falls while it slows steps down, rises while it does not, and respects the limit."""

from collections.abc import Callable

import pytest

from paceline.transfer.weights.server import FIRST_RATE, MIN_RATE, Activity, SendRate

IDLE = Activity()
CHUNK = 64 << 20


def total_seconds(rate: SendRate, chunks: int, size: int, seconds: float = 0.0) -> float:
    """Time of the last chunk of a worker without requests, if preparing each takes `seconds`."""
    now = 100.0
    for _ in range(chunks):
        now += rate.wait(now, IDLE)
        began, now = now, now + seconds
        rate.add(size, began, IDLE)
    return now + rate.wait(now, IDLE) - 100.0


def test_rate_stays_below_the_limit() -> None:
    assert total_seconds(SendRate(1000.0), 10, 500) == 5.0
    assert abs(total_seconds(SendRate(1000.0), 10, 500, seconds=0.1) - 5.0) < 1e-9  # preparing them counts


def test_no_wait_without_a_limit() -> None:
    assert total_seconds(SendRate(0.0), 10, 500) == 0.0
    assert abs(total_seconds(SendRate(0.0), 10, 500, seconds=0.1) - 1.0) < 1e-9


def test_unused_time_does_not_accumulate() -> None:
    rate = SendRate(1000.0)
    rate.add(500, 100.0, IDLE)
    rate.add(500, 200.0, IDLE)
    assert rate.wait(200.0, IDLE) == 0.5


def serve(rate: SendRate, seconds: float, step: Callable[[float], float]) -> float:
    """The mean rate while a worker serves for `seconds`. `step`: seconds of a step at so many bytes per second."""
    now, sent, steps, next_step, recent = 100.0, 0, 0, 100.0, 0.0
    while now < 100.0 + seconds:
        while next_step <= now:
            next_step += step(recent)
            steps += 1
            recent = 0.0
        activity = Activity(True, steps)
        wait = rate.wait(now, activity)
        if wait <= 0.0:
            rate.add(CHUNK, now, activity)
            sent += CHUNK
            recent = rate.rate
        now += 0.0005
    return sent / seconds


def test_the_rate_rises_while_steps_are_as_fast_as_without_sending() -> None:
    rate = SendRate(0.0)
    serve(rate, 5.0, lambda sending: 0.005)
    assert rate.rate > 4 * FIRST_RATE


def test_the_rate_falls_until_steps_are_hardly_slower() -> None:
    rate = SendRate(0.0)
    mean = serve(rate, 20.0, lambda sending: 0.005 * (1.0 + sending / 20e9))
    assert 0.2e9 < mean < 0.8 * FIRST_RATE
    assert rate.rate < FIRST_RATE


def test_a_load_never_stops() -> None:
    rate = SendRate(0.0)
    serve(rate, 20.0, lambda sending: 0.05 if sending else 0.005)
    assert rate.rate >= MIN_RATE


@pytest.mark.parametrize("limit", [1e8, 1e9])
def test_the_limit_holds_while_serving(limit: float) -> None:
    rate = SendRate(limit)
    assert serve(rate, 10.0, lambda sending: 0.005) < 1.1 * limit
    assert rate.rate <= limit


def test_a_worker_that_becomes_idle_sends_at_once() -> None:
    rate = SendRate(0.0)
    assert rate.wait(1.0, Activity(True, 3)) > 0.0  # times steps without sending first
    assert rate.wait(1.001, IDLE) == 0.0
