"""/admin/draft: starts, reports and ends the trial of another draft."""

from typing import Any

import pytest

from paceline.core.status import DraftCounts, DraftStatus, DraftSwapStatus
from paceline.gateway.admin.drafts import draft_report
from tests.gateway.fakes import Served, served

KEY = {"authorization": "Bearer secret-key"}
HEAD = DraftStatus("old-head", "eagle")


def server(**drafts: DraftStatus) -> Served:
    one = served(admin_key="secret-key")
    one.target.draft_statuses = dict(drafts)
    return one


def call(one: Served, method: str, **options: Any) -> Any:
    return one.call(method, "/admin/draft", headers=KEY, **options)


def test_the_key_needs_the_admin_scope() -> None:
    one = server(engine=HEAD)
    assert one.call("GET", "/admin/draft").status_code == 401
    assert one.call("POST", "/admin/draft", json={"draft": "new"}).status_code == 401
    assert not one.target.swaps


def test_the_state_before_any_swap() -> None:
    body = call(server(engine=HEAD), "GET").json()
    assert (body["draft"], body["candidate"], body["verdict"], body["gain"]) == ("old-head", None, None, None)
    assert [worker["worker"] for worker in body["workers"]] == ["engine"]


def test_post_starts_a_trial_and_returns_its_state() -> None:
    one = server(engine=HEAD)
    response = call(one, "POST", json={"draft": "new-head", "seconds": 30.0, "period": 2.0})
    assert response.status_code == 200
    assert one.target.swaps == [("new-head", 30.0, 2.0)]
    body = response.json()
    assert (body["draft"], body["candidate"], body["verdict"]) == ("old-head", "new-head", "continue")
    again = call(one, "POST", json={"draft": "other"})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "swap_running")
    assert len(one.target.swaps) == 1


def test_delete_ends_the_trial() -> None:
    one = server(engine=HEAD)
    assert call(one, "DELETE").json()["verdict"] is None
    assert not one.target.swaps
    call(one, "POST", json={"draft": "new-head"})
    body = call(one, "DELETE").json()
    assert (body["verdict"], body["draft"]) == ("roll back", "old-head")
    assert one.target.swaps[-1][0] == ""


def test_a_server_without_a_draft_says_what_to_set() -> None:
    response = call(server(), "POST", json={"draft": "new-head"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_draft"
    assert "set `draft`" in response.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"draft": ""}, {"draft": "x", "period": 0}, {"draft": "x", "speed": 1}])
def test_a_wrong_body_is_refused(body: dict[str, Any]) -> None:
    assert call(server(engine=HEAD), "POST", json=body).status_code == 400


def test_an_unknown_model_is_a_404() -> None:
    assert call(server(engine=HEAD), "POST", json={"draft": "x", "model": "other"}).status_code == 404


def swapped(verdict: str, gain: float | None, sequences: int = 5) -> DraftStatus:
    counts = DraftCounts(sequences, 2, 10.0)
    swap = DraftSwapStatus(1, "new", verdict, "because", gain, counts, DraftCounts(2 * sequences, 3, 20.0))
    return DraftStatus("new" if verdict == "keep" else "old", "eagle", swap)


def test_workers_are_reported_as_one() -> None:
    both = draft_report({"b": swapped("keep", 0.2), "a": swapped("keep", 0.4)})
    assert (both.verdict, both.draft) == ("keep", "new")
    assert both.gain == pytest.approx(0.3)
    assert (both.current_counts.sequences, both.candidate_counts.sequences) == (10, 20)
    assert both.candidate_counts.goodput == 20.0
    assert [one.worker for one in both.workers] == ["a", "b"]
    assert draft_report({"a": swapped("keep", 0.2), "b": swapped("continue", None)}).verdict == "continue"
    mixed = draft_report({"a": swapped("keep", 0.2), "b": swapped("roll back", -0.1)})
    assert mixed.verdict == "mixed"
    assert mixed.reason == "a: because; b: because"
