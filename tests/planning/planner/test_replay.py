import random

import pytest

from paceline.planning.planner.replay import MOST_FACTOR, TrafficSpan, late_share, load_factor, smallest_pool

SIZES = range(1, 65)


def bursts(seed: int) -> list[TrafficSpan]:
    dice = random.Random(seed)
    return [TrafficSpan(dice.choice((0.0, 5.0, dice.uniform(0.0, 100.0))), 10.0, dice.randint(1, 8)) for _ in range(40)]


def test_a_load_below_the_service_never_waits() -> None:
    assert late_share([TrafficSpan(9.9, 10.0)] * 20, 5.0, 1.0, 2) == 0.0


def test_the_late_share_of_one_burst_is_that_of_the_fluid() -> None:
    # The queue grows by 10 a second, and 10 requests are a second of waiting: late from second 1 of 10 on
    assert late_share([TrafficSpan(20.0, 10.0)], 10.0, 1.0, 1) == pytest.approx(0.9)
    # It takes 10 s to serve what is left; the requests that arrive while the queue is longer than a second are late
    assert late_share([TrafficSpan(20.0, 10.0), TrafficSpan(5.0, 40.0)], 10.0, 1.0, 1) == pytest.approx(
        (180 + 90) / 400
    )


@pytest.mark.parametrize("seed", range(10))
def test_pools_are_monotone_in_load_share_and_capacity(seed: int) -> None:
    spans = bursts(seed)

    def size(factor: float = 1.0, allowed: float = 0.05, capacity: float = 7.0) -> int:
        return smallest_pool(spans, capacity, 1.0, allowed, SIZES, factor)

    for sizes in (
        [size(factor=factor) for factor in (0.5, 0.9, 1.0, 1.3, 4.0)],
        [size(allowed=allowed) for allowed in (0.5, 0.2, 0.05, 0.01, 0.0)],
        [size(capacity=capacity) for capacity in (20.0, 10.0, 7.0, 3.0)],
    ):
        assert sizes == sorted(sizes)
    found = size()
    assert late_share(spans, 7.0, 1.0, found) <= 0.05
    assert found == 1 or late_share(spans, 7.0, 1.0, found - 1) > 0.05


def test_the_factor_explains_the_misses_that_were_seen() -> None:
    spans = bursts(3)
    assert load_factor(spans, 7.0, 1.0, late_share(spans, 7.0, 1.0, None)) == 1.0
    seen = late_share(spans, 7.0, 1.0, None, 1.5)
    assert late_share(spans, 7.0, 1.0, None, load_factor(spans, 7.0, 1.0, seen)) == pytest.approx(seen, abs=0.01)
    assert load_factor(spans, 7.0, 1.0, 0.0) == 1.0
    assert load_factor(spans, 7.0, 1.0, 1.0) == pytest.approx(MOST_FACTOR)


def test_without_load_the_fewest_are_enough() -> None:
    assert smallest_pool([TrafficSpan(0.0, 10.0)], 5.0, 1.0, 0.05, SIZES) == 1
    assert smallest_pool([], 5.0, 1.0, 0.05, range(3, 9)) == 3
