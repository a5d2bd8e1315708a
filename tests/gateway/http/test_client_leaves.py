"""A client that goes away in any phase before the engine frees what it held, while the work of that phase still runs."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.gateway.bodies.process import BodyProcess
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.tokenizer import Tokenizer
from tests.gateway.fakes import FakeTarget, Served, served
from tests.gateway.live import running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
PHASES: dict[str, tuple[Any, str, str, dict[str, Any]]] = {
    "body": (None, "", TEXT, {"prompt": "x"}),
    "check": (BodyProcess, "_ask", TEXT, {"prompt": "x", "user": "y" * 100_000}),
    "encoding": (Tokenizer, "encode", TEXT, {"prompt": "x" * 10_000}),
    "template": (ChatTemplate, "render", CHAT, {"messages": HI, "tools": [TOOL]}),
    "schema": (FakeTarget, "validate", CHAT, {"messages": HI, "response_format": SCHEMA}),
    "waiting": (None, "", TEXT, {"prompt": "x"}),
}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@contextmanager
def held(owner: Any, name: str) -> Iterator[threading.Event]:
    """`owner.name` waits inside the block. Yields the event that it has begun."""
    begun, release = threading.Event(), threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if owner is not None:

            def wait(*_: Any, **__: Any) -> Any:
                begun.set()
                release.wait(30)
                return "null"

            patch.setattr(owner, name, wait, raising=False)
        try:
            yield begun
        finally:
            release.set()


def num_disconnected(server: Served) -> float:
    metric = server.gateway.metrics.registry
    return metric.get_sample_value("paceline_rejected_total", {"model": "fake", "reason": "disconnected"}) or 0.0


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_in_a_phase_frees_its_place(phase: str) -> None:
    owner, name, path, body = PHASES[phase]
    server = served(hold=True)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with running(server) as url, held(None if owner is FakeTarget else owner, name) as begun:
        release = threading.Event()
        if owner is FakeTarget:  # its method is an attribute of the object

            def validate(*_: Any) -> Any:
                begun.set()
                release.wait(30)

            server.target.validate = validate  # type: ignore[method-assign]
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as client:
            client.sendall(head.encode() + data[: len(data) - (phase == "body")])
            if phase == "waiting":
                until(lambda: bool(server.target.requests), "it was not admitted")
            elif phase != "body":
                assert begun.wait(20)
        if phase == "waiting":
            until(lambda: bool(server.target.cancelled), "it was not cancelled")
        else:
            until(lambda: num_disconnected(server) == 1, "the client's work goes on")
            assert server.target.requests == []
        until(lambda: server.gateway.queue.num_admitted == 0, "it keeps its place in the queue")
        assert server.gateway.encoders.num_waiting == 0
        assert not server.gateway._streams
        release.set()
