"""Processor time by owner."""

import time

import pytest

from paceline.core.machine import add_child_time, measured
from paceline.gateway.api.errors import RateLimited
from paceline.gateway.bodies import fair_share
from paceline.gateway.bodies.fair_share import CpuBudgets, Owner


def burn(seconds: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass


def test_work_is_charged_by_the_time_of_its_thread_and_of_its_children() -> None:
    spent: list[float] = []

    def work() -> str:
        burn(0.02)
        add_child_time(5.0)
        return "done"

    assert measured(spent.append, work) == "done"
    assert 5.02 <= spent[0] < 6.0


def test_work_that_fails_is_charged_too() -> None:
    spent: list[float] = []
    with pytest.raises(ValueError, match="bad"):
        measured(spent.append, fail)
    assert len(spent) == 1


def fail() -> None:
    raise ValueError("bad")


def test_the_budget_of_one_owner_is_not_that_of_another() -> None:
    now = [0.0]
    budgets = CpuBudgets(60.0, lambda: now[0])
    ann, bob = Owner("ann"), Owner("bob", weight=2.0)
    budgets.charge(ann, 90.0)
    budgets.charge(bob, 90.0)
    budgets.check(bob)
    with pytest.raises(RateLimited, match="60 seconds") as error:
        budgets.check(ann)
    assert (error.value.code, error.value.retry_after) == ("cpu_budget", 30)
    now[0] = 30.0
    budgets.check(ann)


def test_without_a_budget_nothing_is_refused() -> None:
    budgets = CpuBudgets(None, lambda: 0.0)
    budgets.charge(Owner("ann"), 1e9)
    budgets.check(Owner("ann"))


def test_the_number_of_owners_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_share, "MAX_OWNERS", 2)
    budgets = CpuBudgets(1.0, lambda: 0.0)
    for name in ("a", "b", "c"):
        budgets.charge(Owner(name), 2.0)
    budgets.check(Owner("a"))  # forgotten
    for name in ("b", "c"):
        with pytest.raises(RateLimited):
            budgets.check(Owner(name))
