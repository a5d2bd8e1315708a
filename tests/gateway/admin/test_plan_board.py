from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from starlette.responses import Response
from starlette.testclient import TestClient

from paceline.gateway.admin.plan import PlannerStatus, plan_routes
from paceline.gateway.openai.error_handlers import install_error_handlers

DECISION: dict[str, Any] = {
    "time": 1.0,
    "sizes": {"target": 3, "draft": 1},
    "before": {"target": 2, "draft": 1},
    "cause": "forecast",
    "reason": "More is expected.",
    "load": 10.0,
    "forecast": 15.0,
    "capacity": 5.0,
    "dollars_per_hour": 8.9,
    "is_enough": True,
    "is_acting": False,
}


@pytest.fixture
def client() -> TestClient:
    app, board = FastAPI(), PlannerStatus()
    app.include_router(plan_routes(board))
    install_error_handlers(app)
    registry = CollectorRegistry()
    registry.register(board)
    app.add_route("/metrics", lambda _: Response(generate_latest(registry)))
    return TestClient(app)


def test_decisions_are_shown_with_their_changes_and_in_metrics(client: TestClient) -> None:
    assert client.get("/admin/plan").json() == {"current": None, "changes": [], "samples": []}
    assert b"paceline_planner" not in client.get("/metrics").content
    assert client.put("/admin/plan", json=DECISION).status_code == 200
    assert (
        client.put("/admin/plan", json={**DECISION, "before": DECISION["sizes"], "cause": "steady"}).status_code == 200
    )
    report = client.get("/admin/plan").json()
    assert report["current"]["cause"] == "steady"
    assert [one["cause"] for one in report["changes"]] == ["forecast"]
    assert [(one["load"], one["sizes"]["target"]) for one in report["samples"]] == [(10.0, 3)] * 2
    assert client.get("/admin/plan?since=1.0").json()["samples"] == []
    text = client.get("/metrics").text
    assert 'paceline_planner_workers{role="target"} 3.0' in text
    assert "paceline_planner_forecast 15.0" in text
    assert "paceline_planner_decisions_total 2.0" in text
    assert "paceline_planner_changes_total 1.0" in text


@pytest.mark.parametrize("wrong", [{"load": "nan"}, {"sizes": 3}, {"surprise": 1}])
def test_a_decision_that_cannot_be_is_refused(client: TestClient, wrong: dict[str, Any]) -> None:
    assert client.put("/admin/plan", json={**DECISION, **wrong}).status_code >= 400
