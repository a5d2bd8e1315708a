"""Every response has the id of its request, and what is left of the allowances of its key."""

import asyncio
from pathlib import Path

import httpx
import pytest

from paceline.gateway.auth.api_keys import KeyFile, KeyLimits
from paceline.gateway.http.headers import LIMIT_HEADERS, duration
from tests.gateway.fakes import Served, served

BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "fake", "prompt": "hi"},
}
ID = "x-request-id"


def limited(folder: Path, **limits: int) -> tuple[Served, dict[str, str]]:
    file = KeyFile(folder / "keys.json")
    key = file.add("ann", limits=KeyLimits(**limits))
    return served(api_keys=str(file.path), clock=lambda: 0.0), {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize("given", ["5f0c-11.A:b_2", "x" * 128])
def test_the_id_of_the_client_comes_back(given: str) -> None:
    assert served().call("GET", "/health", headers={ID: given}).headers[ID] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, 'a"b', "a\tb"])
def test_another_id_is_replaced(given: str) -> None:
    server = served()
    found = {server.call("GET", "/health", headers={ID: given}).headers[ID] for _ in range(2)}
    assert len(found) == 2
    assert all(name.startswith("req_") for name in found)


def test_every_response_has_an_id(tmp_path: Path) -> None:
    server, headers = limited(tmp_path, requests_per_minute=100)
    for path, body in BODIES.items():
        assert server.post(path, body, headers={**headers, ID: "mine"}).headers[ID] == "mine"
    responses = [
        server.post("/v1/messages", BODIES["/v1/messages"]),
        server.post("/v1/chat/completions", {"messages": 3}, headers=headers),
        server.call("GET", "/nowhere", headers=headers),
        server.call("GET", "/health", headers={"host": "evil.example"}),
    ]
    assert [response.status_code for response in responses[:3]] == [401, 400, 404]
    assert all(response.headers[ID].startswith("req_") for response in responses)
    assert responses[0].headers["request-id"] == responses[0].headers[ID]


def test_the_response_to_a_bug_has_an_id() -> None:
    server = served()

    @server.app.get("/bug")
    def fail() -> None:
        raise ZeroDivisionError

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(server.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get("/bug", headers={ID: "mine"})

    response = asyncio.run(run())
    assert (response.status_code, response.headers[ID]) == (500, "mine")


@pytest.mark.parametrize("path", BODIES)
def test_what_is_left_of_the_allowances(tmp_path: Path, path: str) -> None:
    server, headers = limited(tmp_path, requests_per_minute=2, tokens_per_minute=6000)
    first = server.post(path, BODIES[path], headers=headers)
    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "6000"
    assert 5000 < int(first.headers["x-ratelimit-remaining-tokens"]) <= 6000
    server.post(path, BODIES[path], headers=headers)
    refused = server.post(path, BODIES[path], headers=headers)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) == 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"


def test_a_key_without_limits_has_no_such_headers() -> None:
    response = served().post("/v1/completions", {"prompt": "hi"})
    assert not response.headers.keys() & set(LIMIT_HEADERS)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.02, "20ms"), (1.0, "1s"), (1.52, "1.5s"), (60.0, "1m0s"), (359.99, "6m0s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
