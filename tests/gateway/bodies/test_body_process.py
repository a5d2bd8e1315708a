"""The process that checks large bodies, and a server that uses it."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.requests import Request

from paceline.gateway.api.errors import BadRequest, Unavailable
from paceline.gateway.bodies import process as body_process
from paceline.gateway.bodies.check import NICE, BodyLimits
from paceline.gateway.bodies.fair_share import Owner
from paceline.gateway.bodies.process import BodyProcess
from paceline.gateway.http import middleware
from tests.gateway.fakes import Served, served

TEXT = "/v1/completions"
GOOD = json.dumps({"prompt": "x" * 100_000}).encode()
LONG = json.dumps({"prompt": "x" * 300_000}).encode()


@pytest.fixture
def process() -> Iterator[BodyProcess]:
    process = BodyProcess(BodyLimits(1000, {"fake": 200_000}), lambda owner, work, seconds: None)
    yield process
    process.close()


@pytest.fixture(scope="module")
def server() -> Served:
    """One for all: its process takes a second to start."""
    return served()


def check(process: BodyProcess, body: bytes) -> None:
    asyncio.run(process.check(Owner("a"), TEXT, body))


def test_bodies_are_checked_one_after_the_other(process: BodyProcess) -> None:
    check(process, GOOD)
    first = process.pid
    with pytest.raises(BadRequest, match="300000 characters") as raised:
        check(process, LONG)
    assert (raised.value.param, raised.value.code) == ("prompt", "context_length_exceeded")
    check(process, GOOD)
    assert process.pid == first != os.getpid()


def test_the_process_yields_to_the_engine(process: BodyProcess) -> None:
    check(process, GOOD)
    assert psutil.Process(process.pid).nice() >= min(19, psutil.Process().nice() + NICE)
    group = Path(f"/proc/{process.pid}/autogroup")
    if group.exists():
        assert group.read_text().split()[-1] == str(NICE)


def test_a_process_that_died_is_started_again(process: BodyProcess) -> None:
    check(process, GOOD)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    check(process, GOOD)
    assert process.pid != first
    assert not psutil.pid_exists(first)


def test_a_check_that_does_not_end_ends_its_process(process: BodyProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    check(process, GOOD)
    first = process.pid
    monkeypatch.setattr(body_process, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(body_process, "TRIES", 1)
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="send the request again"):
        check(process, GOOD)
    monkeypatch.undo()
    check(process, GOOD)
    assert process.pid != first


def test_a_closed_process_has_ended(process: BodyProcess) -> None:
    check(process, GOOD)
    process.close()
    assert process.pid is not None
    assert not psutil.pid_exists(process.pid)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [7] * 100_000},
        {"prompt": "x" * 100_000},
        {"prompt": "x", **{f"unknown_{i}": 1 for i in range(5000)}},
        {"messages": [{"role": "unknown"}] * 5000},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(8000)}},
        "x" * 100_000,
    ],
    ids=["ids", "text", "fields", "messages", "biases", "no object"],
)
def test_the_event_loop_does_no_work_on_a_refused_body(
    body: Any, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the checks of the shape nor the parser of the routes see it in the gateway's process."""

    def fail(*_: Any) -> None:
        pytest.fail("the gateway's process worked on the body")

    for name in ("check_shape", "check_characters"):
        monkeypatch.setattr(middleware, name, fail)
    monkeypatch.setattr(Request, "json", fail)
    data = json.dumps(body).encode()
    assert len(data) > middleware.LARGE
    response = server.call("POST", TEXT, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400


def test_a_large_body_that_passes_runs(server: Served) -> None:
    response = server.post(TEXT, {"prompt": "Hi", "max_tokens": 4, "metadata": {"note": "x" * 100_000}})
    assert response.status_code == 200
