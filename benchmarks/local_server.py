"""A gateway's HTTP server on a thread of this process, and many calls of it at once."""

import asyncio
import threading
import time
from typing import Any

import uvicorn
from fastapi import FastAPI
from raw_http import post


class LocalServer:
    """Constructed listening, on a free port of loopback."""

    def __init__(self, app: FastAPI) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off"))
        self.thread = threading.Thread(target=self._server.run, daemon=True)
        self.thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.should_exit = True
        self.thread.join()


async def complete_all(port: int, body: dict[str, Any], prompts: list[str]) -> dict[str, float]:
    """`body` with every prompt, at once: how many tokens came, and the seconds it took."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(post("127.0.0.1", port, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts)
    )
    seconds = time.perf_counter() - started
    assert all(reply.status == 200 for reply in replies), replies
    found = [reply.body.rpartition(b'"completion_tokens":')[2] for reply in replies]
    return {"seconds": seconds, "tokens": sum(int(text[: text.index(b",")]) for text in found)}
