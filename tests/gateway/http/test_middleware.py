"""Requests of pages from other origins are rejected unless `cors_origins` lists the origin; large bodies take turns."""

import asyncio
import json
from typing import Any

import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.access import ANONYMOUS
from paceline.gateway.bodies.check import BodyLimits
from paceline.gateway.bodies.process import BodyProcess
from paceline.gateway.http import middleware
from paceline.gateway.http.middleware import BodyMiddleware, parse_origins
from tests.gateway.fakes import served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://server.evil.example", "http://server:81", ""]
)
def test_a_foreign_origin_is_rejected(origin: str) -> None:
    server = served()
    response = server.post(CHAT, BODY, headers={"Origin": origin})
    assert response.status_code == 403
    assert (response.json()["error"]["type"], response.json()["error"]["code"]) == (
        "permission_error",
        "foreign_origin",
    )
    preflight = server.call("OPTIONS", CHAT, headers={"Origin": origin, **PREFLIGHT})
    assert preflight.status_code == 403
    for answer in (response, preflight):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert server.target.requests == []
    text = server.gateway.metrics.render().decode()
    assert 'paceline_rejected_total{model="fake",reason="foreign_origin"} 2.0' in text


def test_own_pages_and_other_clients_are_accepted() -> None:
    server = served()
    assert server.post(CHAT, BODY).status_code == 200
    for origin in ("http://server", "https://server"):  # the second: behind a TLS proxy
        assert server.post(CHAT, BODY, headers={"Origin": origin}).status_code == 200


def test_a_listed_origin_can_read_responses_and_errors() -> None:
    server = served(cors_origins="https://app.example, http://localhost:3000", admin_key="open-sesame")
    for origin in ("https://app.example", "http://localhost:3000"):
        preflight = server.call("OPTIONS", CHAT, headers={"Origin": origin, **PREFLIGHT})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        answer = server.post(CHAT, BODY, headers={"Origin": origin})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
        rejected = server.call("GET", "/admin/flags", headers={"Origin": origin})
        assert (rejected.status_code, rejected.headers["access-control-allow-origin"]) == (401, origin)
    assert server.post(CHAT, BODY, headers={"Origin": "https://app.example.evil"}).status_code == 403
    assert server.post(CHAT, BODY, headers={"Origin": "http://app.example"}).status_code == 403


def test_a_star_allows_every_origin() -> None:
    answer = served(cors_origins="*").post(CHAT, BODY, headers={"Origin": "https://any.example"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    "text", ["example.com", "https://", "https://a.example/", "ftp://a.example", "https://a.example b"]
)
def test_an_invalid_origin_is_rejected(text: str) -> None:
    with pytest.raises(InvalidConfig, match="is not an origin"):
        parse_origins(text)


def test_a_list_of_origins() -> None:
    assert parse_origins(None) == parse_origins(" , ") == ()
    assert parse_origins("https://A.example:8443 ,http://[::1]:80") == ("https://a.example:8443", "http://[::1]:80")


class AllPass(BodyProcess):
    async def check(self, path: str, body: bytes) -> None:
        pass


@pytest.mark.parametrize("size", [10, middleware.LARGE + 1])
def test_other_work_runs_between_two_large_bodies(size: int) -> None:
    """A small request that arrives beside eight large ones waits for one of them at most."""
    server, parsed, seen = served(), 0, []
    body = json.dumps("x" * size).encode()

    async def parse(*_: Any) -> None:
        nonlocal parsed
        parsed += 1

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def others() -> None:
        while parsed < 8:
            seen.append(parsed)
            await asyncio.sleep(0)

    async def run() -> None:
        large = AllPass(BodyLimits(10**6, {"fake": 10**6}))
        app = BodyMiddleware(parse, 10**7, server.gateway.limits, 10**6, server.gateway.metrics, large)
        scopes = [{"type": "http", "path": "", "headers": [], "state": {"key": ANONYMOUS}} for _ in range(8)]
        await asyncio.gather(others(), *(app(scope, receive, receive) for scope in scopes))

    asyncio.run(run())
    assert (sorted(set(seen)) == list(range(8))) is (size > middleware.LARGE)


@pytest.mark.parametrize(
    ("content_type", "is_parsed"),
    [
        ("application/json", True),
        ("application/json; charset=utf-8", True),
        ("application/x+JSON", True),
        ("text/plain", False),
        ("application/jsonp", False),
        ("", False),
    ],
)
def test_a_large_body_is_checked_as_its_route_reads_it(content_type: str, is_parsed: bool) -> None:
    """FastAPI parses no body of another type, and the process must not refuse it for another reason than the route."""
    assert bool(middleware.JSON_TYPE.match(content_type.encode())) is is_parsed


def test_a_compressed_body_is_refused() -> None:
    server = served()
    for encoding, status in (("gzip", 415), ("br, identity", 415), ("identity", 200)):
        response = server.post(CHAT, BODY, headers={"Content-Encoding": encoding})
        assert response.status_code == status
    assert (
        server.post(CHAT, BODY, headers={"Content-Encoding": "zstd"}).json()["error"]["code"] == "unsupported_encoding"
    )
