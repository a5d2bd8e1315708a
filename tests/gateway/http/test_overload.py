"""The gateway refuses work in stages while its memory is almost full."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from paceline.core.machine import process_memory
from paceline.gateway.http import app
from paceline.gateway.http.overload import OverloadManager
from paceline.gateway.metrics.metrics import Metrics
from paceline.policy.overload import OverloadPolicy, OverloadRules
from tests.gateway.fakes import Served, served
from tests.gateway.live import running
from tests.processes.target_harness import until

TEXT = "/v1/completions"
SMALL: dict[str, Any] = {"prompt": "x"}
LARGE: dict[str, Any] = {"prompt": "x", "user": "x" * 70_000}


class Watched:
    """A manager whose readings a test sets."""

    def __init__(self, *servers: Served) -> None:
        self.used, self.metrics = 0, Metrics("fake")
        self.told: list[tuple[str, bool]] = []
        gateways = [server.gateway for server in servers]
        self.manager = OverloadManager(
            OverloadPolicy(100 << 20),
            gateways,
            self.metrics,
            lambda: self.used << 20,
            lambda *event: self.told.append(event),
        )

    def observe(self, used: int, now: float) -> None:
        self.used = used
        self.manager.observe(now)

    def values(self) -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in self.metrics.render().decode().splitlines() if line[0] != "#"]
        return {name.replace('model="fake",', ""): float(value) for name, value in lines}


def test_every_change_is_a_metric_an_event_and_a_line(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    for used, now in ((50, 0.0), (85, 1.0), (92, 2.0), (97, 3.0), (20, 4.0), (20, 6.0)):
        watched.observe(used, now)
    assert [(text.partition(": ")[2], is_bad) for text, is_bad in watched.told] == [
        ("memory stage 1, large bodies: 85 of 100 MiB", True),
        ("memory stage 2, new requests: 92 of 100 MiB", True),
        ("memory stage 3, drop: 97 of 100 MiB", True),
        ("memory stage 2, new requests: 20 of 100 MiB", True),
    ]
    assert "gateway: memory stage 3, drop" in caplog.text
    values = watched.values()
    assert values['paceline_gateway_memory_bytes{model="fake"}'] == 20 << 20
    assert values['paceline_gateway_memory_limit_bytes{model="fake"}'] == 100 << 20
    assert values['paceline_overload_stage{model="fake"}'] == 2
    assert values['paceline_overload_changes_total{stage="new_requests"}'] == 2


def test_the_timeline_has_the_event() -> None:
    server = served(gateway_memory_bytes=1)  # any process uses more

    async def events() -> list[str]:
        async with server.app.router.lifespan_context(server.app), server.client() as client:
            while not (found := (await client.get("/v1/paceline/overview")).json()["events"]):
                await asyncio.sleep(0)  # the first reading follows the start
        return [event["text"] for event in found]

    assert any("memory stage 3, drop" in text for text in asyncio.run(events()))


def test_the_most_expensive_request_of_all_models_is_ended() -> None:
    small, large = served(hold=True), served(hold=True)

    async def run() -> None:
        watched = Watched(small, large)
        async with small.client() as first, large.client() as second:
            posts = [
                asyncio.create_task(first.post(TEXT, json={"prompt": "x" * 10, "max_tokens": 8})),
                asyncio.create_task(second.post(TEXT, json={"prompt": "x" * 20, "max_tokens": 8})),
                asyncio.create_task(second.post(TEXT, json={"prompt": "x" * 500, "max_tokens": 8})),
            ]
            while len(small.target.requests) + len(large.target.requests) < 3:
                await asyncio.sleep(0)
            watched.observe(99, 0.0)
            answer = await posts[2]
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "memory_drop")
            watched.observe(99, 0.5)  # once a second
            watched.observe(99, 1.0)
            assert (await posts[1]).status_code == 429
            small.target.release()
            assert (await posts[0]).status_code == 200
        assert watched.values()['paceline_rejected_total{reason="memory_drop"}'] == 2

    asyncio.run(run())


def test_new_requests_are_refused_while_the_memory_of_all_workers_is_full() -> None:
    server = served()
    server.target.is_overloaded = True
    answer = server.post(TEXT, SMALL)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert 'reason="workers_memory"} ' in server.gateway.metrics.render().decode()
    server.target.is_overloaded = False
    assert server.post(TEXT, SMALL).status_code == 200


def test_a_server_with_little_memory_refuses_in_stages_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is that of this process, which really takes and frees it."""
    monkeypatch.setattr(app, "OverloadPolicy", lambda limit: OverloadPolicy(limit, OverloadRules(calm_seconds=0.2)))
    limit = process_memory() + (500 << 20)
    server = served(gateway_memory_bytes=limit, hold=True)
    held: list[bytes] = []

    def take(share: float) -> None:
        used = process_memory() + process_memory(server.app.state.large_bodies.pid)
        held.append(b"x" * int(share * limit - used))

    with running(server) as url, httpx.Client(base_url=url, timeout=60) as client:

        def status(body: dict[str, Any]) -> int:
            return client.post(TEXT, json=body).status_code

        answers: list[dict[str, Any]] = []
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(f"{url}v1/completions", json=SMALL, timeout=120).json())
        )
        thread.start()
        until(lambda: len(server.target.requests) == 1)
        assert status({**LARGE, "max_tokens": -1}) == 400
        take(0.84)
        until(lambda: status({**LARGE, "max_tokens": -1}) == 429)
        assert status({**SMALL, "max_tokens": -1}) == 400
        take(0.925)
        until(lambda: status({**SMALL, "max_tokens": -1}) == 429)
        assert client.get("health").status_code == 200
        assert not answers
        take(0.98)
        thread.join()
        assert answers[0]["error"]["code"] == "memory_drop"
        held.clear()
        until(lambda: status({**LARGE, "max_tokens": -1}) == 400)
        text = client.get("metrics").text
        for reason in ("memory_large_bodies", "memory_new_requests", "memory_drop"):
            assert f'reason="{reason}"' in text
        assert json.loads(client.get("v1/paceline/overview").text)["events"]
