"""Resumable streams: ids of events, and a stream that continues after any of them."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.fakes import Served, served

TEXT = "the quick brown fox"
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 64, "temperature": 1.0, "stream": True, "stop": ["ox!"]}
RESUMABLE = {"stream_options": {"resumable": True, "include_usage": True}}


def stream(server: Served, last: str | None = None, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Ids and data of the events, without `[DONE]`."""
    headers = {} if last is None else {"Last-Event-ID": last}
    response = server.post("/v1/completions", BODY | RESUMABLE | body, headers=headers)
    assert response.status_code == 200, response.text
    return parse(response)


def parse(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    found = []
    for event in events:
        data, name = event.split("\n")
        found.append((name.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


def texts(events: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(choice["text"] for _, data in events for choice in data["choices"])


def test_a_stream_continues_after_any_event() -> None:
    server = served(TEXT)
    whole = stream(server)
    assert texts(whole) == TEXT
    for i, (last, _) in enumerate(whole):
        rest = stream(server, last)
        assert texts(whole[: i + 1]) + texts(rest) == TEXT
        assert {data["id"] for _, data in rest} <= {whole[0][1]["id"]}
        if rest:
            assert rest[-1][1]["usage"]["completion_tokens"] == len(TEXT)
    first, *others = (request.sampling.seed for request in server.target.requests)
    assert set(others) == {first}


def test_choices_continue_each_from_its_own_token() -> None:
    server = served(TEXT, max_waiting=8)
    whole = stream(server, n=2)
    for i in (0, 3, len(whole) - 3):
        seen, rest = whole[: i + 1], stream(server, whole[i][0], n=2)
        for choice in (0, 1):
            parts = [c["text"] for _, data in seen + rest for c in data["choices"] if c["index"] == choice]
            assert "".join(parts) == TEXT


def test_another_body_or_key_does_not_find_the_stream() -> None:
    server = served(TEXT)
    last = stream(server)[0][0]
    for changed in ({"prompt": "y"}, {"temperature": 0.5}, {"n": 2}, {"cache_salt": "other"}):
        response = server.post("/v1/completions", BODY | RESUMABLE | changed, headers={"Last-Event-ID": last})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "stream_not_found"


@pytest.mark.parametrize("last", ["", "7", "cmpl-12:3", "cmpl-" + "0" * 24 + ":x", "cmpl-" + "0" * 24 + ":1..2"])
def test_other_event_ids_are_refused(last: str) -> None:
    response = served(TEXT).post("/v1/completions", BODY | RESUMABLE, headers={"Last-Event-ID": last})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_event_id"


def test_streams_have_no_ids_by_default() -> None:
    response = served(TEXT).post("/v1/completions", BODY)
    assert "id: " not in response.text
    refused = served(TEXT, max_waiting=8).post("/v1/completions", BODY | RESUMABLE | {"prompt": ["a", "b"]})
    assert refused.status_code == 400
