"""`paceline status URL`: the workers of a running server."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli import status as module
from paceline.cli.commands import cli
from paceline.cli.workers import view
from paceline.core.errors import InvalidRequest
from paceline.core.status import WorkerLife, WorkerStatus
from paceline.gateway.client import ServerClient
from tests.gateway.fakes import served
from tests.gateway.live import running


@pytest.fixture
def url() -> Iterator[str]:
    with running(served()) as address:
        yield address.rstrip("/")


SHARED = {"name": "draft-0", "pool": "draft", "role": "draft", "state": "joining", "address": ""}


def paceline(*words: str) -> Any:
    return CliRunner().invoke(cli, words, env={"COLUMNS": "200"})


def test_the_workers_of_a_server(url: str) -> None:
    result = paceline("status", url)
    assert result.exit_code == 0, result.output
    assert "engine-0" in result.output
    document = json.loads(paceline("status", url, "--json").output)
    assert (document["cluster"], [one["name"] for one in document["workers"]]) == (url, ["engine-0"])


def test_doctor_names_the_workers_of_a_server_and_their_symptoms(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = paceline("doctor", "--server", url)
    assert result.exit_code == 0, result.output
    assert "engine-0" in result.output
    symptom = {"name": "host_steps", "figure": 0.2, "limit": 0.05, "remedy": "use a draft model"}
    workers = [{**SHARED, "state": "unhealthy", "symptoms": [symptom]}]
    monkeypatch.setattr(ServerClient, "get", lambda self, path, **query: {"models": ["a"], "workers": workers})
    result = paceline("doctor", "--server", url)
    assert result.exit_code == 1
    assert "unhealthy" in result.output
    assert "use a draft model" in result.output


def test_a_server_that_does_not_answer() -> None:
    result = paceline("status", "http://127.0.0.1:9")
    assert result.exit_code == 2
    words = " ".join(result.output.split())
    assert "no server answers at http://127.0.0.1:9 (Connection refused): start one with `paceline serve`" in words


def test_a_refusal_has_the_text_of_the_server(url: str) -> None:
    with pytest.raises(InvalidRequest, match="does not serve the model 'other'"):
        ServerClient(url).get("/v1/paceline/overview", model="other")


def test_workers_of_several_models_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(self: ServerClient, path: str, **query: object) -> Any:
        own = {"name": f"{query.get('model')}-0", "pool": "target", "role": "target", "state": "ready", "address": ""}
        workers = [own, SHARED]
        return {"models": ["a", "b"], "workers": workers}

    monkeypatch.setattr(ServerClient, "get", get)
    with module.of_server(ServerClient("http://x")) as (_, is_ready, workers):
        assert [worker.name for worker in workers()] == ["a-0", "draft-0", "b-0"]
        assert not is_ready


@pytest.mark.parametrize(("state", "is_shown"), [("ready", False), ("joining", True), ("unhealthy", True)])
def test_the_line_about_an_exit_ends_when_the_worker_is_ready_again(state: str, is_shown: bool) -> None:
    life = WorkerLife(2, time.time() - 90, "SIGKILL")
    worker = WorkerStatus("target-0", "target", "target", state, "", life=life)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(view([worker]))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    assert ("! target-0: restarted 2x, up 2 m, last exit: SIGKILL" in lines) is is_shown
    assert ("up: target-0 2 m (restarted 2x)" in lines) is not is_shown
