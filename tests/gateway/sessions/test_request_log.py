"""The log line of a generation has the id of the response, and no text unless configured."""

import asyncio
import io
import json
from typing import Any

import pytest

from paceline.telemetry.log import configure_logging
from tests.gateway.fakes import Served, events, served
from tests.gateway.test_logs import lines, stream

__all__ = ["stream"]

BODY = {"prompt": "my secret", "max_tokens": 8}


@pytest.fixture
def log(stream: io.StringIO) -> io.StringIO:
    configure_logging("info", stream)
    return stream


def log_line(log: io.StringIO) -> dict[str, Any]:
    (line,) = lines(log)
    return line


def test_the_line_has_key_tokens_and_times(log: io.StringIO) -> None:
    reply = served("Hello there!").post("/v1/completions", BODY, headers={"x-paceline-category": "chat"}).json()
    line = log_line(log)
    assert line.pop("time")
    assert 0.0 <= line.pop("first_token_seconds") <= line.pop("seconds") < 30.0
    assert line == {
        "level": "info",
        "logger": "paceline.gateway.sessions.session",
        "message": "generated",
        "request_id": reply["id"],
        "who": line["who"],
        "category": "chat",
        "prompt_tokens": 9,
        "output_tokens": 8,
        "drafted": 5,
        "accepted": 5,
        "reason": "length",
    }


def test_a_stream_has_the_same_line(log: io.StringIO) -> None:
    reply = served().post("/v1/completions", {**BODY, "stream": True})
    first = json.loads(events(reply)[0])
    line = log_line(log)
    assert (line["request_id"], line["output_tokens"], line["reason"]) == (first["id"], 8, "length")


def test_the_log_has_no_text(log: io.StringIO) -> None:
    server = served("an answer of ours")
    for body in (BODY, {**BODY, "stream": True}):
        server.post("/v1/completions", body)
    server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "my secret"}]})
    server.post("/v1/completions", {"prompt": ["my secret"], "temperature": "my secret"})
    server.post("/v1/completions", {"prompt": "my secret", "stop": ["my secret"], "n": 100})
    assert [line["message"].split()[0] for line in lines(log)] == ["generated"] * 3 + ["refused:"] * 2
    assert "secret" not in log.getvalue()
    assert "answer" not in log.getvalue()


def test_log_requests_text_adds_the_texts(stream: io.StringIO) -> None:
    configure_logging("info", stream, with_texts=True)
    served("Hello there!", log_requests="text").post("/v1/completions", {**BODY, "max_tokens": 100, "n": 2})
    line = log_line(stream)
    assert line["prompt"] == ["my secret"]
    assert line["answer"] == ["Hello there!", "Hello there!"]


def test_log_requests_none_disables_the_line(log: io.StringIO) -> None:
    assert served(log_requests="none").post("/v1/completions", BODY).status_code == 200
    assert lines(log) == []


def served_on_hold(**config: Any) -> Served:
    return served(hold=True, **config)


def test_reasons_of_failed_requests(log: io.StringIO) -> None:
    late = served_on_hold()
    assert late.post("/v1/completions", {**BODY, "timeout": 0.01}).status_code == 408
    full = served_on_hold(max_waiting=0, request_timeout=5.0)

    async def disconnect() -> None:
        async with full.client() as client:
            task = asyncio.create_task(client.post("/v1/completions", json=BODY))
            while not full.target.requests:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(disconnect())
    assert [line["reason"] for line in lines(log)] == ["timeout", "cancelled"]
    assert all(line["request_id"].startswith("cmpl-") for line in lines(log))
