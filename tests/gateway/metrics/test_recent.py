"""Percentiles over a recent time window."""

import pytest

from paceline.gateway.metrics.metrics import MAX_VALUES, VALUES_WINDOW, RecentValues


def test_percentiles_are_nearest_ranks() -> None:
    values = RecentValues()
    for value in (5.0, 1.0, 4.0, 2.0, 3.0):
        values.add(value, now=0.0)
    assert values.percentiles((0.0, 0.2, 0.5, 0.81, 1.0), now=1.0) == (1.0, 1.0, 3.0, 5.0, 5.0)


def test_no_values_no_percentiles() -> None:
    assert RecentValues().percentiles((0.5,), now=0.0) is None


@pytest.mark.parametrize(("later", "left"), [(VALUES_WINDOW - 1.0, (7.0,)), (VALUES_WINDOW, None)])
def test_values_expire(later: float, left: tuple[float, ...] | None) -> None:
    values = RecentValues()
    values.add(7.0, now=10.0)
    assert values.percentiles((0.5,), now=10.0 + later) == left


def test_memory_is_bounded() -> None:
    values = RecentValues()
    for value in range(MAX_VALUES + 10):
        values.add(float(value), now=0.0)
    assert values.percentiles((0.0, 1.0), now=0.0) == (10.0, MAX_VALUES + 9.0)
