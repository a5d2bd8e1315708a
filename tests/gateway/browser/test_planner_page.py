"""The planner's page in a browser."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.fakes import Served, served

pytest.importorskip("selenium")
from tests.gateway.browser.page import Page

Open = Callable[[Served, str], Page]
KEY = "open-sesame"
FIRST: dict[str, Any] = {
    "time": 1_000_000.0,
    "sizes": {"target": 2, "draft": 1},
    "before": {"target": 1, "draft": 1},
    "cause": "forecast",
    "reason": "7.50 requests/s are expected.",
    "load": 5.0,
    "forecast": 7.5,
    "capacity": 4.0,
    "dollars_per_hour": 5.38,
    "is_enough": True,
    "is_acting": True,
}
SECOND = FIRST | {"time": 1_000_010.0, "before": FIRST["sizes"], "cause": "steady", "load": 6.25, "is_enough": False}


def opened(open_page: Open, server: Served, *decisions: dict[str, Any]) -> Page:
    for decision in decisions:
        headers = {"authorization": f"Bearer {KEY}"}
        assert server.call("PUT", "/admin/plan", json=decision, headers=headers).status_code == 200
    return open_page(server, "planner")


def unlock(page: Page) -> None:
    page.until(lambda: page.one("#unlock").is_displayed())
    page.write("#admin-key", KEY)
    page.click("#unlock button")


def test_load_pools_cost_and_decisions(open_page: Open) -> None:
    page = opened(open_page, served(admin_key=KEY), FIRST, SECOND)
    unlock(page)
    page.wait_for_text("#state", "acting")
    assert "6.25" in page.text("#figures")
    assert "2 target, 1 draft" in page.text("#figures")
    assert "$5.38" in page.text("#figures")
    (row,) = page.texts("#decision-table tbody tr")
    assert "forecast" in row
    assert "set target 1 → 2" in row
    assert FIRST["reason"] in row
    labels = [one.get_attribute("aria-label") for one in page.all(".plot")]
    assert labels[0] == "Requests per second: load 6.25; forecast 7.50; capacity 8.00"
    assert labels[1] == "Planned workers: draft 1; target 2"
    assert labels[2] == "Dollars an hour: cost $5.38"


def test_without_a_planner_the_page_says_how_to_start_one(open_page: Open) -> None:
    page = opened(open_page, served(admin_key=KEY))
    page.wait_for_text("#state", "locked")
    unlock(page)
    assert "paceline planner --url" in page.wait_for_text("#note", "no planner reports to this gateway")
    page.wait_for_text("#state", "not configured")
    assert not page.one("#plan").is_displayed()
    assert page.network_errors() == []


def test_without_an_admin_key_the_page_says_how_to_set_one(open_page: Open) -> None:
    page = opened(open_page, served())
    assert "PACELINE_ADMIN_KEY=choose-a-key paceline serve" in page.wait_for_text("#note", "no admin key")
    assert not page.one("#plan").is_displayed()
    assert not page.one("#unlock").is_displayed()
    assert page.network_errors() == []
