"""Dollars per hour and per million tokens."""

from dataclasses import replace

import pytest

from paceline.core.status import WorkerLife, WorkerStatus
from paceline.policy.cost.cost import cost_since_start, dollars_per_hour, recent_cost

TARGET = WorkerStatus("t-0", "t", "target", "ready", "", life=WorkerLife(started=1000.0), generated=10_000, price=3.6)
DRAFT = WorkerStatus("d-0", "d", "draft", "joining", "", life=WorkerLife(started=2800.0), price=1.8)


def test_all_present_workers_cost() -> None:
    gone = replace(TARGET, name="t-1", state="gone")
    assert dollars_per_hour([TARGET, DRAFT, gone]) == pytest.approx(5.4)
    assert recent_cost([TARGET, DRAFT, gone], 10.0) == pytest.approx(5.4 / 36_000 * 1e6)
    # one hour of the target and half an hour of the draft worker for 10,000 tokens
    assert cost_since_start([TARGET, DRAFT, gone], 4600.0) == pytest.approx((3.6 + 0.9) * 100.0)


def test_without_prices_or_tokens_there_is_no_figure() -> None:
    free = replace(TARGET, price=None)
    assert dollars_per_hour([free]) is recent_cost([free], 10.0) is cost_since_start([free], 4600.0) is None
    assert recent_cost([TARGET], 0.0) is cost_since_start([replace(TARGET, generated=0)], 4600.0) is None


def test_a_pool_without_a_price_costs_nothing() -> None:
    assert dollars_per_hour([TARGET, replace(DRAFT, price=None)]) == pytest.approx(3.6)
