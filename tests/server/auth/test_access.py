"""Who is let in: keys, scopes, limits and sizes, over HTTP, and every refusal in OpenAI's shape."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.clock import VirtualClock
from paceline.core.errors import InvalidConfig
from paceline.server.auth.access import RELOAD_SECONDS, Access
from paceline.server.auth.api_keys import KeyFile, KeyLimits
from paceline.server.config.config import ServerConfig
from paceline.server.openai.errors import Unauthorised
from tests.server.fakes import Served, events, served

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
OPEN_PATHS = ["/", "/dashboard/index.html", "/health", "/ready", "/docs", "/openapi.json"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
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


def keyed(file: KeyFile, **config: Any) -> Served:
    return served(api_keys=str(file.path), **config)


# --- keys and scopes


def test_a_good_key_is_let_in_and_others_are_not(file: KeyFile) -> None:
    key = file.add("ann")
    server = keyed(file)
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
        assert refusal(response, 401, "invalid_api_key")["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    assert len(server.target.requests) == 1
    text = server.gateway.metrics.render().decode()
    assert f'paceline_rejected_total{{model="fake",reason="unauthorised"}} {len(wrong)}.0' in text


def test_a_key_without_the_admin_scope_may_not_administer(file: KeyFile) -> None:
    key, admin = file.add("ann"), file.add("root", scopes=("admin",))
    server = keyed(file)
    for method in ("GET", "PATCH"):
        response = server.call(method, "/admin/flags", json={"enabled": False}, headers=bearer(key))
        assert refusal(response, 403, "missing_scope")["type"] == "permission_error"
    assert server.gateway.flags.history == ()
    assert server.call("PATCH", "/admin/flags", json={"enabled": False}, headers=bearer(admin)).status_code == 200
    refusal(server.post(CHAT, BODY, headers=bearer(admin)), 403, "missing_scope")


def test_who_changed_which_flag_is_the_keys_name_whatever_the_header_says(file: KeyFile) -> None:
    ann, ben = (file.add(name, scopes=("admin",)) for name in ("ann", "ben"))
    server = keyed(file)
    server.call("PATCH", "/admin/flags", json={"max_depth": 2}, headers=bearer(ann))
    server.call("PATCH", "/admin/flags", json={"enabled": False}, headers={**bearer(ben), "X-Paceline-Who": "ann"})
    history = server.call("GET", "/admin/flags", headers=bearer(ann)).json()["history"]
    assert [(change["who"], change["changes"]) for change in history] == [
        ("ann (127.0.0.1)", {"max_depth": 2}),
        ("ben (ann)", {"enabled": False}),
    ]


def test_metrics_need_a_key_unless_they_are_open(file: KeyFile) -> None:
    ann, scraper, admin = file.add("ann"), file.add("scraper", scopes=("metrics",)), file.add("root", scopes=("admin",))
    server = keyed(file)
    for path in ("/metrics", "/v1/paceline/overview"):
        refusal(server.call("GET", path), 401, "invalid_api_key")
        refusal(server.call("GET", path, headers=bearer(ann)), 403, "missing_scope")
        assert server.call("GET", path, headers=bearer(scraper)).status_code == 200
        assert server.call("GET", path, headers=bearer(admin)).status_code == 200
    opened = keyed(file, open_metrics=True)
    assert opened.call("GET", "/metrics").status_code == 200
    refusal(opened.call("GET", "/v1/paceline/overview"), 401, "invalid_api_key")
    refusal(opened.post(CHAT, BODY), 401, "invalid_api_key")


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_probes_and_pages_need_none(path: str, file: KeyFile) -> None:
    file.add("ann")
    assert keyed(file).call("GET", path).status_code == 200


@pytest.mark.parametrize(
    "path", ["/nothing", "/healthy", "/dashboards", "//admin/flags", "/admin", "/v1/models", "/tokenize", "/metrics/x"]
)
def test_whatever_is_not_open_is_closed(path: str, file: KeyFile) -> None:
    file.add("ann")
    refusal(keyed(file).call("GET", path), 401, "invalid_api_key")


def test_a_server_without_keys_is_open_and_has_no_admins() -> None:
    server = served()
    assert server.post(CHAT, BODY, headers=bearer("whatever")).status_code == 200
    assert server.call("GET", "/metrics").status_code == 200
    refusal(server.call("GET", "/admin/flags"), 404, "not_found")


def test_the_admin_key_is_one_more_key(file: KeyFile) -> None:
    alone = served(admin_key="open-sesame")
    assert alone.post(CHAT, BODY).status_code == 200
    refusal(alone.call("GET", "/admin/flags", headers=bearer("close-sesame")), 401, "invalid_api_key")
    assert alone.call("GET", "/admin/flags", headers=bearer("open-sesame")).status_code == 200
    file.add("ann")
    beside = keyed(file, admin_key="open-sesame")
    assert beside.call("GET", "/admin/flags", headers=bearer("open-sesame")).status_code == 200
    refusal(beside.post(CHAT, BODY, headers=bearer("open-sesame")), 403, "missing_scope")


def test_keys_made_and_revoked_while_the_server_runs(file: KeyFile) -> None:
    first = file.add("ann")
    clock = VirtualClock()
    access = Access(file, clock.now)
    assert access.admit(CHAT, f"Bearer {first}").name == "ann"
    second = file.add("ben")
    file.revoke("ann")
    assert access.admit(CHAT, f"Bearer {first}").name == "ann"  # for a second at the most
    clock.advance(RELOAD_SECONDS)
    assert access.admit(CHAT, f"Bearer {second}").name == "ben"
    with pytest.raises(Unauthorised):
        access.admit(CHAT, f"Bearer {first}")


def test_a_file_damaged_later_changes_nothing(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    key = file.add("ann")
    clock = VirtualClock()
    access = Access(file, clock.now)
    file.path.write_text("{")
    clock.advance(RELOAD_SECONDS)
    assert access.admit(CHAT, f"Bearer {key}").name == "ann"
    assert "stay as they were" in caplog.text


def test_a_file_that_is_none_is_said_at_the_start(file: KeyFile) -> None:
    with pytest.raises(InvalidConfig, match="paceline api-keys add"):
        Access.from_config(ServerConfig(api_keys=str(file.path)), lambda: 0.0)
    file.add("ann", strict=True)
    with pytest.raises(InvalidConfig, match="'ann' is strict, which needs a trail"):
        Access.from_config(ServerConfig(api_keys=str(file.path)), lambda: 0.0)


# --- limits


def test_requests_a_minute_are_429_with_when_to_come_back(file: KeyFile) -> None:
    key, other = file.add("ann", limits=KeyLimits(requests_per_minute=2)), file.add("ben")
    clock = VirtualClock(50.0)
    server = keyed(file, clock=clock.now)
    for _ in range(2):
        assert server.post(CHAT, BODY, headers=bearer(key)).status_code == 200
    response = server.post(CHAT, BODY, headers=bearer(key))
    assert refusal(response, 429, "rate_limit_exceeded")["type"] == "rate_limit_error"
    assert response.headers["retry-after"] == "30"
    refusal(server.post("/tokenize", {"prompt": "x"}, headers=bearer(key)), 429, "rate_limit_exceeded")
    assert server.post(CHAT, BODY, headers=bearer(other)).status_code == 200
    assert 'paceline_rejected_total{model="fake",reason="rate_limited"} 2.0' in server.gateway.metrics.render().decode()
    clock.advance(30)
    assert server.post("/tokenize", {"prompt": "x"}, headers=bearer(key)).status_code == 200
    refusal(server.post(CHAT, BODY, headers=bearer(key)), 429, "rate_limit_exceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_a_minute_count_prompts_and_outputs(stream: bool, file: KeyFile) -> None:
    key = file.add("ann", limits=KeyLimits(tokens_per_minute=60))
    clock = VirtualClock()
    server = keyed(file, clock=clock.now)
    body = {"prompt": "x" * 30, "max_tokens": 40, "stream": stream}  # "Hello there!" is 12 tokens
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    response = server.post("/v1/completions", body, headers=bearer(key))
    refusal(response, 429, "rate_limit_exceeded")
    assert response.headers["retry-after"] == "12"  # 60 - 30 - 12 = 18 are left, and 30 are needed
    clock.advance(12)
    assert server.post("/v1/completions", body, headers=bearer(key)).status_code == 200
    clock.advance(60)
    refusal(server.post("/v1/completions", {"prompt": "x" * 61}, headers=bearer(key)), 400, "over_key_limit")


def test_choices_at_once(file: KeyFile) -> None:
    key, other = file.add("ann", limits=KeyLimits(max_concurrent=2)), file.add("ben")
    server = keyed(file, hold=True)

    async def run() -> None:
        async with server.client() as client:

            def post(key: str, n: int) -> "asyncio.Task[httpx.Response]":
                return asyncio.create_task(client.post(CHAT, json={**BODY, "n": n}, headers=bearer(key)))

            first = post(key, 2)
            while not server.target.requests:
                await asyncio.sleep(0)
            response = await post(key, 1)
            refusal(response, 429, "rate_limit_exceeded")
            assert response.headers["retry-after"] == "1"
            second = post(other, 1)
            while len(server.target.requests) < 2:
                await asyncio.sleep(0)
            server.target.release()
            assert [(await one).status_code for one in (first, second)] == [200, 200]
            refusal(await post(key, 3), 400, "over_key_limit")
            third = post(key, 2)
            while len(server.target.requests) < 3:
                await asyncio.sleep(0)
            server.target.release()
            assert (await third).status_code == 200

    asyncio.run(run())


# --- tenants and sizes


def test_keys_share_no_cached_prefix(file: KeyFile) -> None:
    ann, ben = file.add("ann"), file.add("ben")
    server = keyed(file)
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


def test_an_oversized_body_is_refused_and_a_stranger_before_it_is_read(file: KeyFile) -> None:
    key = file.add("ann")
    server = keyed(file, max_body_bytes=2048)
    large = {"messages": [{"role": "user", "content": "x" * 3000}]}
    response = server.post(CHAT, large, headers=bearer(key))
    assert refusal(response, 413, "too_large")["type"] == "invalid_request_error"
    assert response.headers["connection"] == "close"

    async def untold() -> Any:
        for _ in range(4):
            yield b"x" * 1024

    refusal(server.call("POST", CHAT, content=untold(), headers=bearer(key)), 413, "too_large")
    read: list[bytes] = []

    async def watched() -> Any:
        read.append(b"x")
        yield json.dumps(BODY).encode()

    refusal(server.call("POST", CHAT, content=watched()), 401, "invalid_api_key")
    assert server.target.requests == []


def test_streams_need_a_key_too(file: KeyFile) -> None:
    key = file.add("ann")
    server = keyed(file)
    assert events(server.post(CHAT, {**BODY, "stream": True}, headers=bearer(key)))[-1] == "[DONE]"
    refusal(server.post(CHAT, {**BODY, "stream": True}), 401, "invalid_api_key")
