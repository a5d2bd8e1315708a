"""Keys, scopes, rate limits and body sizes over HTTP. Every rejection is an OpenAI error object."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.gateway.api.errors import Unauthorised
from paceline.gateway.auth.access import RELOAD_SECONDS, Access
from paceline.gateway.auth.api_keys import KeyFile, KeyLimits
from paceline.gateway.auth.rate_limit import BODY_BYTES_PER_TOKEN
from paceline.gateway.config.config import ServerConfig
from tests.gateway.fakes import Served, events, served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
OPEN_PATHS = ["/", "/dashboard/index.html", "/health", "/ready", "/docs", "/openapi.json"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def rejection(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    error: dict[str, Any] = body["error"]
    return error


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def served_with_keys(file: KeyFile, **config: Any) -> Served:
    return served(api_keys=str(file.path), **config)


# --- keys and scopes


def test_only_a_valid_key_is_accepted(file: KeyFile) -> None:
    key = file.add("ann")
    server = served_with_keys(file)
    assert server.post(CHAT, BODY, headers=bearer(key)).status_code == 200
    assert server.call("GET", "/v1/models", headers=bearer(key)).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        bearer(""),
        bearer("none"),
        bearer(key[:-1]),
        bearer(key + "x"),
        bearer("pl-000000000000-" + "x" * 43),
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
    ]
    for headers in wrong:
        response = server.post(CHAT, BODY, headers=headers)
        assert rejection(response, 401, "invalid_api_key")["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert len(server.target.requests) == 1
    text = server.gateway.metrics.render().decode()
    assert f'paceline_rejected_total{{model="fake",reason="unauthorised"}} {len(wrong)}.0' in text


def test_admin_routes_need_the_admin_scope(file: KeyFile) -> None:
    key, admin = file.add("ann"), file.add("root", scopes=("admin",))
    server = served_with_keys(file)
    for method in ("GET", "PATCH"):
        response = server.call(method, "/admin/flags", json={"enabled": False}, headers=bearer(key))
        assert rejection(response, 403, "missing_scope")["type"] == "permission_error"
    assert server.gateway.flags.history == ()
    assert server.call("PATCH", "/admin/flags", json={"enabled": False}, headers=bearer(admin)).status_code == 200
    rejection(server.post(CHAT, BODY, headers=bearer(admin)), 403, "missing_scope")


def test_flag_history_records_the_key_name_and_the_header(file: KeyFile) -> None:
    ann, ben = (file.add(name, scopes=("admin",)) for name in ("ann", "ben"))
    server = served_with_keys(file)
    server.call("PATCH", "/admin/flags", json={"max_depth": 2}, headers=bearer(ann))
    server.call("PATCH", "/admin/flags", json={"enabled": False}, headers={**bearer(ben), "X-Paceline-Who": "ann"})
    history = server.call("GET", "/admin/flags", headers=bearer(ann)).json()["history"]
    assert [(change["who"], change["changes"]) for change in history] == [
        ("ann (127.0.0.1)", {"max_depth": 2}),
        ("ben (ann)", {"enabled": False}),
    ]


def test_metrics_need_a_key_unless_open_metrics_is_set(file: KeyFile) -> None:
    ann, scraper, admin = file.add("ann"), file.add("scraper", scopes=("metrics",)), file.add("root", scopes=("admin",))
    server = served_with_keys(file)
    for path in ("/metrics", "/v1/paceline/overview"):
        rejection(server.call("GET", path), 401, "invalid_api_key")
        rejection(server.call("GET", path, headers=bearer(ann)), 403, "missing_scope")
        assert server.call("GET", path, headers=bearer(scraper)).status_code == 200
        assert server.call("GET", path, headers=bearer(admin)).status_code == 200
    opened = served_with_keys(file, open_metrics=True)
    assert opened.call("GET", "/metrics").status_code == 200
    rejection(opened.call("GET", "/v1/paceline/overview"), 401, "invalid_api_key")
    rejection(opened.post(CHAT, BODY), 401, "invalid_api_key")


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_health_checks_and_pages_need_no_key(path: str, file: KeyFile) -> None:
    file.add("ann")
    assert served_with_keys(file).call("GET", path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/nothing", "/healthy", "/dashboards", "//admin/flags", "/admin", "/v1/models", "/tokenize", "/metrics/x"]
)
def test_every_other_path_needs_a_key(path: str, file: KeyFile) -> None:
    file.add("ann")
    rejection(served_with_keys(file).call("GET", path), 401, "invalid_api_key")


def test_without_keys_the_api_is_open_and_has_no_admin_routes() -> None:
    server = served()
    assert server.post(CHAT, BODY, headers=bearer("whatever")).status_code == 200
    assert server.call("GET", "/metrics").status_code == 200
    rejection(server.call("GET", "/admin/flags"), 404, "not_found")


def test_admin_key_adds_one_key(file: KeyFile) -> None:
    alone = served(admin_key="open-sesame")
    assert alone.post(CHAT, BODY).status_code == 200
    rejection(alone.call("GET", "/admin/flags", headers=bearer("close-sesame")), 401, "invalid_api_key")
    assert alone.call("GET", "/admin/flags", headers=bearer("open-sesame")).status_code == 200
    file.add("ann")
    beside = served_with_keys(file, admin_key="open-sesame")
    assert beside.call("GET", "/admin/flags", headers=bearer("open-sesame")).status_code == 200
    rejection(beside.post(CHAT, BODY, headers=bearer("open-sesame")), 403, "missing_scope")


def test_added_and_revoked_keys_apply_without_a_restart(file: KeyFile) -> None:
    first = file.add("ann")
    clock = VirtualClock()
    access = Access(file, clock.now)
    assert access.authenticate(CHAT, f"Bearer {first}").name == "ann"
    second = file.add("ben")
    file.revoke("ann")
    assert access.authenticate(CHAT, f"Bearer {first}").name == "ann"  # valid for up to RELOAD_SECONDS
    clock.advance(RELOAD_SECONDS)
    assert access.authenticate(CHAT, f"Bearer {second}").name == "ben"
    with pytest.raises(Unauthorised):
        access.authenticate(CHAT, f"Bearer {first}")


def test_a_damaged_key_file_keeps_the_current_keys(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    key = file.add("ann")
    clock = VirtualClock()
    access = Access(file, clock.now)
    file.path.write_text("{")
    clock.advance(RELOAD_SECONDS)
    assert access.authenticate(CHAT, f"Bearer {key}").name == "ann"
    assert "current keys stay valid" in caplog.text


def test_key_file_problems_are_reported_at_start(file: KeyFile) -> None:
    with pytest.raises(InvalidConfig, match="paceline api-keys add"):
        Access.from_config(ServerConfig(api_keys=str(file.path)), lambda: 0.0)
    file.add("ann", strict=True)
    with pytest.raises(InvalidConfig, match="'ann' is strict and needs an audit log"):
        Access.from_config(ServerConfig(api_keys=str(file.path)), lambda: 0.0)


# --- limits


def test_request_limit_returns_429_with_retry_after(file: KeyFile) -> None:
    key, other = file.add("ann", limits=KeyLimits(requests_per_minute=2)), file.add("ben")
    clock = VirtualClock(50.0)
    server = served_with_keys(file, clock=clock.now)
    for _ in range(2):
        assert server.post(CHAT, BODY, headers=bearer(key)).status_code == 200
    response = server.post(CHAT, BODY, headers=bearer(key))
    assert rejection(response, 429, "rate_limit_exceeded")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "30"
    rejection(server.post("/tokenize", {"prompt": "x"}, headers=bearer(key)), 429, "rate_limit_exceeded")
    assert server.post(CHAT, BODY, headers=bearer(other)).status_code == 200
    assert 'paceline_rejected_total{model="fake",reason="rate_limited"} 2.0' in server.gateway.metrics.render().decode()
    clock.advance(30)
    assert server.post("/tokenize", {"prompt": "x"}, headers=bearer(key)).status_code == 200
    rejection(server.post(CHAT, BODY, headers=bearer(key)), 429, "rate_limit_exceeded")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [-1] * 2000}, 400),
        ({"prompt": "x" * 16_000}, 400),
        ({"prompt": [1] * 200_000}, 400),
        ({"messages": []}, 400),
    ],
    ids=["invalid", "too long", "too many values", "wrong fields"],
)
def test_a_body_that_is_refused_is_charged_by_its_size(body: dict[str, Any], status: int, file: KeyFile) -> None:
    key = file.add("ann", limits=KeyLimits(requests_per_minute=2, tokens_per_minute=10_000))
    server = served_with_keys(file, clock=VirtualClock().now)
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == status
    (account,) = server.gateway.limits._accounts.values()
    assert account.requests is not None
    assert account.tokens is not None
    assert account.requests.wait_seconds(2, 0.0) > 0
    size = len(httpx.Request("POST", "http://server", json=body).content)
    assert account.tokens.wait_seconds(10_000, 0.0) == pytest.approx(size // BODY_BYTES_PER_TOKEN * 60 / 10_000)


def test_an_admitted_request_pays_for_its_prompt_and_not_for_its_body(file: KeyFile) -> None:
    key = file.add("ann", limits=KeyLimits(requests_per_minute=2, tokens_per_minute=50))
    server = served_with_keys(file, clock=VirtualClock().now)
    body = {"prompt": "x" * 20, "max_tokens": 1, "user": "u" * 600}  # a body of 80 tokens
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    rejection(server.post("/v1/completions", body, headers=bearer(key)), 429, "rate_limit_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_token_limit_counts_prompts_and_outputs(stream: bool, file: KeyFile) -> None:
    key = file.add("ann", limits=KeyLimits(tokens_per_minute=60))
    clock = VirtualClock()
    server = served_with_keys(file, clock=clock.now)
    body = {"prompt": "x" * 30, "max_tokens": 40, "stream": stream}  # "Hello there!" is 12 tokens
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    response = server.post("/v1/completions", body, headers=bearer(key))
    rejection(response, 429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "12"  # 60 - 30 - 12 = 18 are left, and 30 are needed
    clock.advance(12)
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    clock.advance(60)
    rejection(server.post("/v1/completions", {"prompt": "x" * 61}, headers=bearer(key)), 400, "over_key_limit")


def test_concurrent_choices_limit(file: KeyFile) -> None:
    key, other = file.add("ann", limits=KeyLimits(max_concurrent=2)), file.add("ben")
    server = served_with_keys(file, hold=True)

    async def run() -> None:
        async with server.client() as client:

            def post(key: str, n: int) -> "asyncio.Task[httpx.Response]":
                return asyncio.create_task(client.post(CHAT, json={**BODY, "n": n}, headers=bearer(key)))

            first = post(key, 2)
            while not server.target.requests:
                await asyncio.sleep(0)
            response = await post(key, 1)
            rejection(response, 429, "rate_limit_exceeded")
            assert response.headers["retry-after"] == "1"
            second = post(other, 1)
            while len(server.target.requests) < 2:
                await asyncio.sleep(0)
            server.target.release()
            assert [(await one).status_code for one in (first, second)] == [200, 200]
            rejection(await post(key, 3), 400, "over_key_limit")
            third = post(key, 2)
            while len(server.target.requests) < 3:
                await asyncio.sleep(0)
            server.target.release()
            assert (await third).status_code == 200

    asyncio.run(run())


# --- cache salts and body sizes


def test_keys_share_no_cached_prefix(file: KeyFile) -> None:
    ann, ben = file.add("ann"), file.add("ben")
    server = served_with_keys(file)
    for key in (ann, ben):
        for salt in (None, "same"):
            server.post(CHAT, {**BODY, "cache_salt": salt}, headers=bearer(key))
    server.post(CHAT, BODY, headers=bearer(ann))
    salts = [request.cache_salt for request in server.target.requests]
    assert len(set(salts[:4])) == 4
    assert salts[4] == salts[0] != ""
    opened = served()
    opened.post(CHAT, BODY)
    opened.post(CHAT, {**BODY, "cache_salt": "own"})
    assert [request.cache_salt for request in opened.target.requests] == ["", "own"]


def test_oversized_bodies_are_rejected_and_keys_are_checked_first(file: KeyFile) -> None:
    key = file.add("ann")
    server = served_with_keys(file, max_body_bytes=2048)
    large = {"messages": [{"role": "user", "content": "x" * 3000}]}
    response = server.post(CHAT, large, headers=bearer(key))
    assert rejection(response, 413, "too_large")["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"

    async def chunked() -> Any:
        for _ in range(4):
            yield b"x" * 1024

    rejection(server.call("POST", CHAT, content=chunked(), headers=bearer(key)), 413, "too_large")
    read: list[bytes] = []

    async def watched() -> Any:
        read.append(b"x")
        yield json.dumps(BODY).encode()

    rejection(server.call("POST", CHAT, content=watched()), 401, "invalid_api_key")
    assert server.target.requests == []


def test_streams_need_a_key(file: KeyFile) -> None:
    key = file.add("ann")
    server = served_with_keys(file)
    assert events(server.post(CHAT, {**BODY, "stream": True}, headers=bearer(key)))[-1] == "[DONE]"
    rejection(server.post(CHAT, {**BODY, "stream": True}), 401, "invalid_api_key")
