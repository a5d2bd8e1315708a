"""A deadline holds against a client that does not read its stream."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI

from paceline.gateway.auth.rate_limit import ConnectionLimits
from paceline.gateway.http.protocol import LimitedProtocol
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
