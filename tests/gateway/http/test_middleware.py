"""Requests of pages from other origins are rejected unless `cors_origins` lists the origin; large bodies take turns."""

import asyncio
import json
from typing import Any

import pytest

from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.access import ANONYMOUS
from paceline.gateway.auth.api_keys import ApiKey
from paceline.gateway.bodies.check import BodyLimits
from paceline.gateway.bodies.fair_share import Owner
from paceline.gateway.bodies.process import BodyProcess
from paceline.gateway.http import middleware
from paceline.gateway.http.middleware import BodyMiddleware, parse_origins
from paceline.gateway.http.overload import OverloadManager
from paceline.gateway.metrics.metrics import Metrics
from paceline.policy.overload import OverloadPolicy, OverloadStage
from tests.gateway.fakes import Served, served

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
    async def check(self, owner: Owner, path: str, body: bytes) -> None:
        pass


def body_middleware(
    app: Any, server: Served, limit: int = 10**7, has_keys: bool = False, overload: OverloadPolicy | None = None
) -> BodyMiddleware:
    policy, metrics = overload or OverloadPolicy(1), Metrics("fake")
    return BodyMiddleware(
        app,
        gateway=server.gateway,
        limit=limit,
        most_values=10**6,
        large=AllPass(BodyLimits(10**6, {"fake": 10**6}), server.gateway.charge_cpu),
        overload=OverloadManager(policy, [server.gateway], metrics, lambda: 0),
        has_keys=has_keys,
    )


@pytest.mark.parametrize("size", [10, middleware.LARGE + 1])
def test_other_work_runs_between_two_large_bodies(size: int) -> None:
    """A small request that arrives beside eight large ones waits for one of them at most."""
    server, parsed, seen = served(), 0, []
    body = json.dumps("x" * size).encode()

    async def parse(*_: Any) -> None:
        nonlocal parsed
        parsed += 1

    def receiver() -> Any:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        return receive

    async def send(message: Any) -> None:
        pass

    async def others() -> None:
        while parsed < 8:
            seen.append(parsed)
            await asyncio.sleep(0)

    async def run() -> None:
        app = body_middleware(parse, server)
        scopes = [{"type": "http", "path": "", "headers": [], "state": {"key": ANONYMOUS}} for _ in range(8)]
        await asyncio.gather(others(), *(app(scope, receiver(), send) for scope in scopes))

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


class Client:
    """One client of a `BodyMiddleware`: what it sends, when it leaves, and what it received."""

    def __init__(
        self, app: BodyMiddleware, key: Any = ANONYMOUS, path: str = "/v1/completions", **headers: str
    ) -> None:
        names = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "POST", "path": path, "headers": list(names.items()), "state": {"key": key}}
        self.task = asyncio.ensure_future(app(scope, self.messages.get, self._take))

    async def _take(self, message: Any) -> None:
        self.received.append(message)

    def send(self, body: bytes, more_body: bool = False) -> None:
        self.messages.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    def leave(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return self.received[0]["status"] if self.received else 0


async def turns(count: int = 20) -> None:
    """Lets all other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_memory_is_reserved_by_the_length_before_the_body_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_MEMORY", 8 * 10**6)

    async def run() -> None:
        app = body_middleware(answer_ok, server := served(), limit=10**6)
        clients = [Client(app, content_length=str(10**6)) for _ in range(10)]
        await turns()
        assert app._memory.held == 2 * 10**6  # a quarter
        assert app._memory.num_waiting == 8
        other = Client(app, key=ApiKey.from_text("k" * 20, "other", id="other"), content_length="10")
        other.send(b"{}")
        await other.task
        assert other.status == 200
        for client in clients:
            client.leave()
        await asyncio.gather(*(client.task for client in clients))
        assert (app._memory.held, app._memory.num_waiting) == (0, 0)
        assert 'reason="disconnected"} 10.0' in server.gateway.metrics.render().decode()

    asyncio.run(run())


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_chunked_body_reserves_more_when_it_grows() -> None:
    async def run() -> None:
        app = body_middleware(answer_ok, served(), limit=10**6)
        client = Client(app, transfer_encoding="chunked")
        client.send(bytes(middleware.LARGE), more_body=True)
        await turns()
        assert app._memory.held == middleware.LARGE
        client.send(b"x", more_body=True)
        await turns()
        assert app._memory.held == 10**6
        client.send(b"")
        await client.task
        assert app._memory.held == 0

    asyncio.run(run())


def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_GRACE", 0.05)

    async def run() -> None:
        app = body_middleware(answer_ok, server := served())
        client = Client(app, content_length="100")
        client.send(b"{", more_body=True)
        await client.task
        assert client.status == 408
        assert b"slow_body" in client.received[1]["body"]
        assert 'reason="slow_body"} 1.0' in server.gateway.metrics.render().decode()

    asyncio.run(run())


def test_a_body_without_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "MEMORY_WAIT", 0.05)

    async def run() -> None:
        app = body_middleware(answer_ok, served())
        clients = [Client(app, content_length=str(10**7)) for _ in range(3)]
        await clients[-1].task
        assert clients[-1].status == 429
        for client in clients:
            client.leave()
        await asyncio.gather(*(client.task for client in clients))

    asyncio.run(run())


def test_a_path_without_a_key_takes_no_body() -> None:
    async def run() -> None:
        app = body_middleware(answer_ok, served(), has_keys=True)
        for headers in ({"content_length": "1"}, {"transfer_encoding": "chunked"}):
            client = Client(app, path="/health", **headers)
            client.send(b"x", more_body=True)
            await client.task
            assert client.status == 413
        client = Client(app, path="/health")
        client.send(b"")
        await client.task
        assert client.status == 200

    asyncio.run(run())


def test_a_client_that_leaves_ends_the_work_for_it() -> None:
    """Until the response starts. Afterwards the response itself watches the client."""

    async def run() -> None:
        ended = list[str]()

        async def work(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            if scope["path"] == "/started":
                await send({"type": "http.response.start", "status": 200, "headers": []})
            try:
                await asyncio.sleep(0.2)
            except asyncio.CancelledError:
                ended.append(scope["path"])
                raise

        app = body_middleware(work, served())
        clients = [Client(app, path=path, content_length="2") for path in ("/started", "/waiting")]
        for client in clients:
            client.send(b"{}")
        await turns()
        for client in clients:
            client.leave()
        await asyncio.gather(*(client.task for client in clients))
        assert ended == ["/waiting"]
        assert app._memory.held == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("share", "small", "large", "code"),
    [(0.5, 200, 200, ""), (0.85, 200, 429, "memory_large_bodies"), (0.92, 429, 429, "memory_new_requests")],
)
def test_a_full_memory_refuses_large_bodies_first(share: float, small: int, large: int, code: str) -> None:
    async def run() -> None:
        policy = OverloadPolicy(1000)
        policy.observe(int(share * 1000), 0.0)
        app = body_middleware(answer_ok, server := served(), overload=policy)
        for size, status in ((10, small), (middleware.LARGE + 1, large)):
            client = Client(app, content_length=str(size))
            client.send(b"1" * size)
            await client.task
            assert client.status == status
            if status == 429:
                assert code.encode() in client.received[1]["body"]
        chunked = Client(app, transfer_encoding="chunked")
        chunked.send(b"1" * (middleware.LARGE + 1))
        await chunked.task
        assert chunked.status == large
        health = Client(app, path="/health")
        health.send(b"")
        await health.task
        assert health.status == 200
        refused = server.gateway.metrics.render().decode()
        assert policy.stage is OverloadStage.NORMAL or f'reason="{code}"' in refused

    asyncio.run(run())


def test_an_owner_without_processor_time_is_refused_until_it_has_some() -> None:
    clock = [0.0]

    async def run() -> None:
        server = served(clock=lambda: clock[0], cpu_seconds_per_minute=6.0)
        app = body_middleware(answer_ok, server)

        async def status(key: Any = ANONYMOUS) -> int:
            client = Client(app, key=key, content_length="2")
            client.send(b"{}")
            await client.task
            return client.status

        assert await status() == 200
        server.gateway.charge_cpu(Owner("address "), "text", 8.0)
        assert await status() == 429
        assert await status(ApiKey.from_text("k" * 20, "other", id="other")) == 200
        clock[0] = 19.0
        assert await status() == 429
        clock[0] = 21.0
        assert await status() == 200
        text = server.gateway.metrics.render().decode()
        assert 'reason="cpu_budget"} 2.0' in text
        assert 'paceline_gateway_cpu_seconds_total{model="fake",work="text"} 8.0' in text

    asyncio.run(run())
