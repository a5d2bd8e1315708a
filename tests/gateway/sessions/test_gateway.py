"""Overload, time limits, disconnects, engine failures and draining."""

import asyncio
import json
import os
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from paceline.core.config import EngineConfig
from paceline.core.request import Request, ValidatedRequest
from paceline.gateway.api.errors import RequestTimeout
from paceline.gateway.openai.requests import THREAD_CHARS
from tests.gateway.fakes import Served, events, served

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 8}


def served_small(**config: Any) -> Served:
    """One running and one waiting request, and a target that generates nothing until released."""
    return served(hold=True, engine=EngineConfig(model="fake", max_num_seqs=1), max_waiting=1, **config)


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def post(client: httpx.AsyncClient, **change: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(PATH, json={**BODY, **change}))


def test_a_full_queue_returns_429_with_retry_after() -> None:
    async def run() -> None:
        server = served_small()
        async with server.client() as client:
            running = [post(client), post(client, stream=True)]
            await until(lambda: len(server.target.requests) == 2)
            for stream in (False, True):
                rejected = await post(client, stream=stream)
                assert rejected.status_code == 429
                assert 1 <= int(rejected.headers["retry-after"]) <= 60
                assert rejected.json()["error"]["code"] == "overloaded"
            server.target.release()
            assert [(await task).status_code for task in running] == [200, 200]
            again = post(client)
            await until(lambda: len(server.target.requests) == 3)
            server.target.release()
            assert (await again).status_code == 200

    asyncio.run(run())


def test_more_choices_than_the_capacity_are_a_bad_request() -> None:
    assert served_small().post(PATH, {**BODY, "n": 3}).status_code == 400


def test_invalid_requests_take_no_capacity() -> None:
    server = served(engine=EngineConfig(model="fake", max_num_seqs=1), max_waiting=0)
    for _ in range(3):
        assert server.post(PATH, {**BODY, "logit_bias": {"99999": 1}}).status_code == 400
    assert server.post(PATH, BODY).status_code == 200


def test_one_invalid_prompt_rejects_all() -> None:
    server = served(hold=True)
    assert server.post(PATH, {"prompt": [[1], [999]]}).status_code == 400
    assert server.target.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_its_time_limit(stream: bool) -> None:
    server = served_small()
    response = server.post(PATH, {**BODY, "timeout": 0.02, "stream": stream})
    assert response.status_code == 408
    assert response.json()["error"]["param"] == "timeout"
    assert response.headers["x-should-retry"] == "false"
    assert server.target.cancelled == [server.target.requests[0].id]


def test_the_servers_time_limit_applies() -> None:
    assert served_small(request_timeout=0.02).post(PATH, {**BODY, "timeout": 60}).status_code == 408


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_request(stream: bool) -> None:
    async def run() -> None:
        server = served_small()
        disconnected = asyncio.Event()
        sent: list[Any] = []
        pending = [{"type": "http.request", "body": json.dumps({**BODY, "stream": stream}).encode()}]

        async def receive() -> Any:
            if pending:
                return pending.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": headers, "query_string": b""}
        task = asyncio.create_task(server.app(scope, receive, send))
        await until(lambda: server.target.requests)
        disconnected.set()
        await asyncio.wait_for(task, 5)
        assert server.target.cancelled == [server.target.requests[0].id]
        assert server.gateway.num_waiting == 0
        assert 'outcome="cancelled"} 1.0' in server.gateway.metrics.render().decode()

    asyncio.run(run())


def test_engine_failures_before_and_during_a_stream() -> None:
    async def run() -> None:
        server = served("Hello there!", hold=True, engine=EngineConfig(model="fake", max_num_seqs=8))
        async with server.client() as client:
            tasks = [post(client), post(client, stream=True)]
            await until(lambda: len(server.target.requests) == 2)
            server.target.fail()
            assert [(await task).status_code for task in tasks] == [503, 503]

    asyncio.run(run())

    def failing_server() -> Served:
        server = served("Hello there!", hold=True)
        outputs = server.target._outputs

        def broken(request: Any, choice: int) -> Any:
            yield outputs(request, choice)[0]
            raise AssertionError

        server.target._outputs = broken  # type: ignore[method-assign]
        return server

    async def within() -> httpx.Response:
        server = failing_server()
        async with server.client() as client:
            task = post(client, stream=True)
            await until(lambda: server.target.requests)
            (stream,) = server.gateway._streams
            with pytest.raises(AssertionError):
                server.target.release()
            asyncio.get_running_loop().call_soon(stream.fail, RequestTimeout(0.1))  # after its first output
            return await task

    *data, done = events(asyncio.run(within()))
    assert done == "[DONE]"
    assert json.loads(data[0])["choices"][0]["text"] == "Hel"
    assert json.loads(data[1])["error"]["code"] == "timeout"


def test_draining_finishes_running_requests_and_rejects_new_ones() -> None:
    async def run() -> None:
        server = served_small()
        async with server.client() as client:
            running = post(client, stream=True)
            await until(lambda: server.target.requests)
            drain = asyncio.create_task(server.gateway.drain())
            await asyncio.sleep(0)
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            rejected = await post(client)
            assert rejected.status_code == 503
            assert rejected.json()["error"]["code"] == "unavailable"
            assert not drain.done()
            server.target.release()
            assert await drain is True
            assert events(await running)[-1] == "[DONE]"

    asyncio.run(run())


def test_draining_has_a_time_limit() -> None:
    async def run() -> None:
        server = served_small(drain_timeout=0.02)
        async with server.client() as client:
            running = post(client)
            await until(lambda: server.target.requests)
            assert await server.gateway.drain() is False
            assert (await running).status_code == 503
            assert server.target.cancelled == [server.target.requests[0].id]

    asyncio.run(run())


def test_draining_an_idle_server_is_immediate() -> None:
    assert asyncio.run(served_small().gateway.drain()) is True


def test_schemas_that_wait_for_their_check_do_not_delay_long_prompts() -> None:
    """Long prompts are encoded on the event loop's threads, of which there are few."""

    async def run() -> None:
        server, checked = served(engine=EngineConfig(model="fake", max_model_len=20_000)), threading.Event()
        validate = server.target.validate

        def wait(request: Request) -> ValidatedRequest:
            if request.sampling.json_schema is not None:
                checked.wait(10)
            return validate(replace(request, sampling=replace(request.sampling, json_schema=None)))

        server.target.validate = wait
        async with server.client() as client:
            count = min(32, (os.cpu_count() or 1) + 4)
            waiting = [post(client, response_format={"type": "json_object"}) for _ in range(count)]
            await asyncio.sleep(0)
            long = await asyncio.wait_for(post(client, prompt="x" * (THREAD_CHARS + 1)), 5)
            assert long.status_code == 200
            assert not any(task.done() for task in waiting)
            checked.set()
            assert {(await task).status_code for task in waiting} == {200}

    asyncio.run(run())
