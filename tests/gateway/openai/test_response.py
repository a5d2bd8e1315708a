"""Streams of clients that do not read, and of requests that wait long for their first token."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from paceline.gateway.auth.rate_limit import ConnectionLimits
from paceline.gateway.http.protocol import LimitedProtocol
from paceline.gateway.openai import response
from tests.gateway.fakes import served


@contextmanager
def listening(app: FastAPI) -> Iterator[int]:
    """The port of a server with small send buffers."""
    protocol: Any = partial(LimitedProtocol, limits=ConnectionLimits(100, 100), client_timeout=60.0, record=print)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", log_config=None, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_a_client_that_reads_nothing_holds_nothing_after_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    server = served(text=lambda _: "x" * 3000)
    body = json.dumps({"prompt": "Hi", "max_tokens": 3000, "stream": True, "timeout": 0.5}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with listening(server.app) as port, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(("127.0.0.1", port))
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        started = time.monotonic()
        while not server.target.requests or server.gateway._streams:
            assert time.monotonic() < started + 10, "the stream outlives its deadline"
            time.sleep(0.01)
        received = b""
        with suppress(ConnectionResetError):
            while part := client.recv(65536):
                received += part
        assert b"[DONE]" not in received
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16}),
    ],
)
def test_a_stream_that_waits_for_its_first_token_gets_comments(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "KEEP_ALIVE_SECONDS", 0.001)
    server = served(text=lambda _: "Yes", hold=True)
    request = {"stream": True} | body
    with listening(server.app) as port, httpx.stream("POST", f"http://127.0.0.1:{port}{path}", json=request) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()
        assert next(lines) == ": keep-alive"
        server.target.release()
        events = [line for line in lines if line.startswith("data: ")]
    assert "Yes" in "".join(events)


def test_a_failure_before_the_first_comment_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    server = served(text=lambda _: "Yes", hold=True)
    body = {"prompt": "Hi", "stream": True, "timeout": 0.01}
    with listening(server.app) as port:
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body).status_code == 408
    monkeypatch.setattr(response, "KEEP_ALIVE_SECONDS", 0.001)
    with listening(server.app) as port:
        late = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body)
    assert late.status_code == 200
    assert late.text.startswith(": keep-alive\n\n")
    assert "timeout" in late.text
