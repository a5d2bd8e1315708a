"""Two keys at one gateway: the queue serves both, and priority is granted by the key."""

import asyncio
from pathlib import Path
from typing import Any

import httpx

from paceline.core.config import EngineConfig
from paceline.gateway.auth.api_keys import KeyFile, KeyShare
from tests.gateway.fakes import Served, served
from tests.gateway.sessions.test_gateway import BODY, PATH, until


def served_keys(tmp_path: Path, **config: Any) -> tuple[Served, dict[str, dict[str, str]]]:
    """A target that runs two requests at once, and the headers of two keys."""
    file = KeyFile(tmp_path / "keys.json")
    headers = {name: {"Authorization": f"Bearer {file.add(name)}"} for name in ("ann", "ben")}
    headers["gold"] = {"Authorization": f"Bearer {file.add('gold', share=KeyShare(priority=-5))}"}
    engine = EngineConfig(model="fake", max_num_seqs=2)
    return served(hold=True, engine=engine, api_keys=str(file.path), **config), headers


def post(client: httpx.AsyncClient, headers: dict[str, str], **change: Any) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(client.post(PATH, json={**BODY, **change}, headers=headers))


def test_another_key_is_next_and_a_flood_gives_way(tmp_path: Path) -> None:
    async def run() -> None:
        server, keys = served_keys(tmp_path, max_waiting=6)
        async with server.client() as client:
            flood = [post(client, keys["ann"], prompt="a") for _ in range(8)]
            await until(lambda: server.gateway.queue.num_admitted == 8)
            assert len(server.target.requests) == 3  # two run, and one waits at the target
            assert (await post(client, keys["ann"])).status_code == 429
            other = post(client, keys["ben"], prompt="b")
            await until(lambda: any(task.done() for task in flood))
            refused = [task for task in flood if task.done()]
            assert [task.result().status_code for task in refused] == [429]
            assert int(refused[0].result().headers["retry-after"]) >= 1
            server.target.release()
            await until(lambda: len(server.target.requests) > 3)
            ids = [server.target.tokenizer.decode(request.prompt_ids) for request in server.target.requests]
            assert ids[3] == "b"
            while not other.done() or not all(task.done() for task in flood):
                server.target.release()
                await asyncio.sleep(0.001)
            assert other.result().status_code == 200
            assert [task.result().status_code for task in flood].count(200) == 7
            assert server.gateway.queue.num_admitted == 0

    asyncio.run(run())


def test_a_waiting_request_that_disconnects_or_times_out_leaves_the_queue(tmp_path: Path) -> None:
    async def run() -> None:
        server, keys = served_keys(tmp_path, max_waiting=6)
        async with server.client() as client:
            running = [post(client, keys["ann"]) for _ in range(3)]
            await until(lambda: len(server.target.requests) == 3)
            late = await post(client, keys["ben"], timeout=0.02)
            assert late.status_code == 408
            assert server.gateway.queue.num_waiting == 0
            server.target.release()
            assert [(await task).status_code for task in running] == [200] * 3

    asyncio.run(run())


def test_a_key_grants_the_priority(tmp_path: Path) -> None:
    server, keys = served_keys(tmp_path, max_waiting=6)

    async def run() -> None:
        async with server.client() as client:
            tasks = []
            for name, priority in (("ann", -9), ("ann", 3), ("gold", -9)):
                tasks.append(post(client, keys[name], priority=priority))
                await until(lambda: server.gateway.queue.num_admitted == len(tasks))
            server.target.release()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [request.priority for request in server.target.requests] == [0, 3, -5]
    tenants = [request.tenant for request in server.target.requests]
    assert tenants[0] == tenants[1] != tenants[2]
    assert all(tenants)
