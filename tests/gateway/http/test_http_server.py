"""The gateways of a server, and the settings of its HTTP server."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig
from paceline.gateway.auth.access import Access
from paceline.gateway.config.config import ServerConfig
from paceline.gateway.http import server as server_module
from paceline.gateway.http.server import (
    IDLE_SECONDS,
    DrainingServer,
    TlsFiles,
    check_settings,
    make_models,
    make_server,
)
from paceline.targets.client import TargetClient
from tests.gateway.fakes import FakeTarget


@pytest.mark.parametrize(
    "settings", [{"cors_origins": "app.example.com"}, {"allowed_hosts": "a b"}, {"trusted_proxies": "*"}]
)
def test_wrong_settings_are_named(settings: dict[str, Any]) -> None:
    check_settings(ServerConfig())
    with pytest.raises(InvalidConfig, match=next(iter(settings))):
        check_settings(ServerConfig(**settings))


def two_models() -> tuple[ServerConfig, Access, list[FakeTarget], Any]:
    """A server of two models: its settings, its targets, and the models."""
    config = ServerConfig()
    access = Access.from_config(config, lambda: 0.0)
    configs = [ServerConfig(engine=EngineConfig(model=name), served_model_name=name) for name in ("one", "two")]
    targets = [FakeTarget(lambda _: "text", 1, False, own.engine) for own in configs]
    models = make_models(config, access, configs, cast("list[TargetClient]", targets), [None, None])
    return config, access, targets, models


def test_every_model_has_a_gateway_and_all_share_the_flags() -> None:
    _, _, targets, models = two_models()
    assert [gateway.model for gateway in models] == ["one", "two"]
    assert models.of("two").target is targets[1]
    models.first.flags.update({"max_depth": 3}, "operator")
    assert [target._validator.flags.max_depth for target in targets] == [3, 3]


def test_the_server_starts_the_process_for_large_bodies_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    config, access, _, models = two_models()
    calls: list[str] = []
    server = make_server(config, models, access, TlsFiles("c.pem", "k.pem"), None, lambda: calls.append("ready"))
    app: Any = server.config.app
    monkeypatch.setattr(app.state.large_bodies, "start", lambda: calls.append("large bodies"))
    server._on_ready()
    assert calls == ["large bodies", "ready"]
    assert (server.config.ssl_certfile, server.config.ssl_keyfile) == ("c.pem", "k.pem")
    assert server.config.timeout_keep_alive == IDLE_SECONDS


@pytest.mark.parametrize(
    ("trusted", "peer", "seen"),
    [
        (None, "127.0.0.1", "127.0.0.1"),
        ("10.0.0.0/8", "127.0.0.1", "127.0.0.1"),
        ("10.0.0.0/8", "10.1.2.3", "6.6.6.6"),
        ("10.0.0.0/8, ::1", "::1", "6.6.6.6"),
    ],
)
def test_only_trusted_proxies_name_the_client(
    trusted: str | None, peer: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local client cannot give each wrong key another address."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    _, access, _, models = two_models()
    server = make_server(ServerConfig(trusted_proxies=trusted), models, access, None, None, lambda: None)
    addresses = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        addresses.append(scope["client"][0])

    server.config.app = app
    server.config.load()
    scope = {"type": "http", "client": (peer, 1), "headers": [(b"x-forwarded-for", b"6.6.6.6")]}
    asyncio.run(server.config.loaded_app(scope, None, None))
    assert addresses == [seen]


class StreamingModels:
    """Models with requests that run until `finish` or `abort`."""

    def __init__(self, num_requests: int) -> None:
        self.first = SimpleNamespace(config=ServerConfig(drain_timeout=30.0))
        self.num_requests = num_requests
        self._end: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def drain(self) -> bool:
        return not self.num_requests or await self._end

    def finish(self) -> None:
        self._end.set_result(True)

    def abort(self) -> None:
        self._end.set_result(False)


@asynccontextmanager
async def stopping(models: StreamingModels, number: signal.Signals) -> AsyncIterator[DrainingServer]:
    """A server that has received a signal. It has stopped when the block ends."""
    server = DrainingServer(uvicorn.Config(lambda: None), cast(Any, models), lambda: None)
    server._loop = asyncio.get_running_loop()
    server.handle_exit(number, None)
    await asyncio.sleep(0)
    yield server
    assert server._drain_task is not None
    await server._drain_task
    assert server.should_exit


@pytest.mark.parametrize(("number", "key"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_stopping_server_says_what_it_waits_for_and_a_second_signal_aborts(
    number: signal.Signals, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        async with stopping(StreamingModels(3), number) as server:
            assert caplog.messages == [f"stopping: waiting up to 30 s for 3 requests; a second {key} aborts them"]
            server.handle_exit(number, None)
        assert not server.all_finished

    asyncio.run(run())
    assert caplog.messages[1:] == ["stopping: 3 requests aborted"]


def test_a_stopping_server_is_not_silent_while_it_waits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(server_module, "REPORT_SECONDS", 0.0)

    async def run() -> None:
        models = StreamingModels(1)
        async with stopping(models, signal.SIGINT) as server:
            while "waiting for 1 request" not in caplog.messages:
                await asyncio.sleep(0)
            models.finish()
        assert server.all_finished

    asyncio.run(run())


def test_an_idle_server_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        async with stopping(StreamingModels(0), signal.SIGINT) as server:
            pass
        assert server.all_finished

    asyncio.run(run())
    assert caplog.messages == ["stopping"]
