"""Manners: overload, timeouts, clients that leave, engines that break, and shutting down."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from paceline.core.config import EngineConfig
from tests.server.fakes import Served, events, served

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 8}


def small(**config: Any) -> Served:
    """One seat, one place to wait, and an engine that holds its tongue."""
    return served(hold=True, engine=EngineConfig(model="fake", max_num_seqs=1), max_waiting=1, **config)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def post(client: httpx.AsyncClient, **change: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(PATH, json={**BODY, **change}))


def test_who_finds_no_place_is_told_when_to_come_back() -> None:
    async def run() -> None:
        server = small()
        async with server.client() as client:
            inside = [post(client), post(client, stream=True)]
            await until(lambda: len(server.target.requests) == 2)
            for stream in (False, True):
                turned_away = await post(client, stream=stream)
                assert turned_away.status_code == 429
                assert 1 <= int(turned_away.headers["retry-after"]) <= 60
                assert turned_away.json()["error"]["code"] == "overloaded"
            server.target.release()
            assert [(await task).status_code for task in inside] == [200, 200]
            again = post(client)
            await until(lambda: len(server.target.requests) == 3)
            server.target.release()
            assert (await again).status_code == 200

    asyncio.run(run())


def test_what_never_fits_is_not_worth_a_retry() -> None:
    assert small().post(PATH, {**BODY, "n": 3}).status_code == 400


def test_refused_requests_take_no_seat() -> None:
    server = served(engine=EngineConfig(model="fake", max_num_seqs=1), max_waiting=0)
    for _ in range(3):
        assert server.post(PATH, {**BODY, "logit_bias": {"99999": 1}}).status_code == 400
    assert server.post(PATH, BODY).status_code == 200


def test_of_several_prompts_all_are_started_or_none() -> None:
    server = served(hold=True)
    assert server.post(PATH, {"prompt": [[1], [999]]}).status_code == 400
    assert server.target.cancelled == [server.target.requests[0].id]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long(stream: bool) -> None:
    server = small()
    response = server.post(PATH, {**BODY, "timeout": 0.02, "stream": stream})
    assert response.status_code == 408
    assert response.json()["error"]["param"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    assert server.target.cancelled == [server.target.requests[0].id]


def test_the_servers_own_limit_holds_too() -> None:
    assert small(request_timeout=0.02).post(PATH, {**BODY, "timeout": 60}).status_code == 408


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_seat_up(stream: bool) -> None:
    async def run() -> None:
        server = small()
        left = asyncio.Event()
        sent: list[Any] = []
        pending = [{"type": "http.request", "body": json.dumps({**BODY, "stream": stream}).encode()}]

        async def receive() -> Any:
            if pending:
                return pending.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
        task = asyncio.create_task(server.app(scope, receive, send))
        await until(lambda: server.target.requests)
        left.set()
        await asyncio.wait_for(task, 5)
        assert server.target.cancelled == [server.target.requests[0].id]
        assert server.gateway.num_waiting == 0
        assert 'outcome="cancelled"} 1.0' in server.gateway.metrics.render().decode()

    asyncio.run(run())


def test_an_engine_that_breaks_before_and_within_a_stream() -> None:
    async def run() -> None:
        server = served("Hello there!", hold=True, engine=EngineConfig(model="fake", max_num_seqs=8))
        async with server.client() as client:
            tasks = [post(client), post(client, stream=True)]
            await until(lambda: len(server.target.requests) == 2)
            server.target.fail()
            assert [(await task).status_code for task in tasks] == [503, 503]

    asyncio.run(run())

    def halfway() -> Served:
        server = served("Hello there!", hold=True)
        outputs = server.target._outputs

        def broken(request: Any, choice: int) -> Any:
            yield outputs(request, choice)[0]
            raise AssertionError

        server.target._outputs = broken  # type: ignore[method-assign]
        return server

    async def within() -> httpx.Response:
        server = halfway()
        async with server.client() as client:
            task = post(client, stream=True, timeout=0.1)
            await until(lambda: server.target.requests)
            with pytest.raises(AssertionError):
                server.target.release()
            return await task

    *data, done = events(asyncio.run(within()))
    assert done == "[DONE]"
    assert json.loads(data[0])["choices"][0]["text"] == "Hel"
    assert json.loads(data[1])["error"]["code"] == "timeout"


def test_draining_lets_those_inside_finish_and_nobody_in() -> None:
    async def run() -> None:
        server = small()
        async with server.client() as client:
            inside = post(client, stream=True)
            await until(lambda: server.target.requests)
            drain = asyncio.create_task(server.gateway.drain())
            await asyncio.sleep(0)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            turned_away = await post(client)
            assert turned_away.status_code == 503
            assert turned_away.json()["error"]["code"] == "unavailable"
            assert not drain.done()
            server.target.release()
            assert await drain is True
            assert events(await inside)[-1] == "[DONE]"

    asyncio.run(run())


def test_draining_does_not_wait_for_ever() -> None:
    async def run() -> None:
        server = small(drain_timeout=0.02)
        async with server.client() as client:
            inside = post(client)
            await until(lambda: server.target.requests)
            assert await server.gateway.drain() is False
            assert (await inside).status_code == 503
            assert server.target.cancelled == [server.target.requests[0].id]

    asyncio.run(run())


def test_draining_an_idle_server_is_immediate() -> None:
    assert asyncio.run(small().gateway.drain()) is True
