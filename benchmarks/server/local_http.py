"""A server on a thread of this process, and a minimal HTTP client whose own work is small."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


async def post(host: str, port: int, path: str, body: dict[str, Any]) -> Reply:
    """One request on a new connection. The returned body includes chunk sizes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        pieces = []
        while piece := await reader.read(1 << 16):
            pieces.append(piece)
        head_bytes, _, rest = b"".join(pieces).partition(b"\r\n\r\n")
        first, *lines = head_bytes.decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return Reply(int(first.split()[1]), headers, rest)
    finally:
        writer.close()


class LocalServer:
    """Listens on a free loopback port as soon as it is constructed."""

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
    """Send `body` with every prompt concurrently; return tokens and seconds."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(post("127.0.0.1", port, "/v1/completions", {**body, "prompt": prompt}) for prompt in prompts)
    )
    seconds = time.perf_counter() - started
    assert all(reply.status == 200 for reply in replies), replies
    found = [reply.body.rpartition(b'"completion_tokens":')[2] for reply in replies]
    return {"seconds": seconds, "tokens": sum(int(text[: text.index(b",")]) for text in found)}
