"""/admin/weights: changes the weights of all workers, and reports the change."""

from pathlib import Path
from typing import Any

import pytest

from paceline.core.status import WeightsStatus
from paceline.gateway.admin import weights
from tests.gateway.fakes import FINGERPRINT, Served, served

KEY = {"authorization": "Bearer secret-key"}


def server(*workers: str, **config: Any) -> Served:
    made = served(admin_key="secret-key", **config)
    made.target.weights_statuses = dict.fromkeys(workers or ("engine-0",))
    return made


def post(one: Served, **body: Any) -> Any:
    return one.call("POST", "/admin/weights", headers=KEY, json=body)


def test_the_key_needs_the_admin_scope() -> None:
    one = server()
    assert one.call("GET", "/admin/weights").status_code == 401
    assert one.call("POST", "/admin/weights", json={"folder": "new"}).status_code == 401
    assert not one.target.changes


def test_the_state_before_any_change() -> None:
    body = server().call("GET", "/admin/weights", headers=KEY).json()
    assert body == {
        "system_fingerprint": FINGERPRINT,
        "workers": [{"worker": "engine-0", "source": None, "state": None, "reason": ""}],
    }


def test_post_returns_when_all_workers_have_the_new_weights() -> None:
    one = server("target-0", "target-1")
    body = post(one, folder="/models/step-7", seconds=5.0).json()
    assert one.target.changes == [("/models/step-7", "", 5.0)]
    assert one.target.settled == [True]
    assert body["system_fingerprint"] == "fp_1"
    assert [(w["worker"], w["source"], w["state"]) for w in body["workers"]] == [
        ("target-0", "/models/step-7", "done"),
        ("target-1", "/models/step-7", "done"),
    ]
    assert one.call("GET", "/admin/weights", headers=KEY).json() == body
    assert post(one, peer="tcp://10.0.0.5:7100").status_code == 200
    assert one.target.changes[-1] == ("", "tcp://10.0.0.5:7100", 60.0)


@pytest.mark.parametrize("body", [{}, {"folder": "a", "peer": "b"}, {"folder": "a", "wait": 1}])
def test_a_wrong_body_is_refused(body: dict[str, Any]) -> None:
    one = server()
    assert post(one, **body).status_code == 400
    assert not one.target.changes


def test_a_refusal_of_all_workers_is_an_error_of_the_request() -> None:
    one = server("target-0", "target-1")
    one.target.refusals = dict.fromkeys(("target-0", "target-1"), "no config.json")
    answer = post(one, folder="broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "weights_refused")
    assert "target-1: no config.json" in answer.json()["error"]["message"]
    assert one.target.settled == [False]


def test_a_refusal_of_some_workers_says_that_they_differ() -> None:
    one = server("target-0", "target-1")
    one.target.refusals = {"target-1": "out of memory"}
    answer = post(one, folder="large")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "weights_mixed")
    assert one.target.settled == [True]


def test_one_change_at_a_time() -> None:
    one = server()
    one.target.weights_statuses["engine-0"] = WeightsStatus(3, "other", "waiting")
    answer = post(one, folder="new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "change_running")


def test_workers_that_do_not_begin_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "ANSWER_SECONDS", 0.05)
    one = server()
    monkeypatch.setattr(one.target, "change_weights", lambda *_: 77)
    assert post(one, folder="new").status_code == 503


def test_strict_mode_keeps_the_weights_that_its_log_names(tmp_path: Path) -> None:
    one = server(audit_trail=str(tmp_path / "trail.jsonl"))
    answer = post(one, folder="new")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "strict_mode")
