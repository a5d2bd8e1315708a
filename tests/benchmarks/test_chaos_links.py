"""The proxies of `make chaos`: connections are copied, cut and repeated, each for its own source."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "trust"))
    import chaos_links

    return chaos_links


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


@pytest.fixture
def link(links: Any, listener: socket.socket) -> Iterator[Any]:
    """This process is the gateway."""
    made = links.Link("target-0", listener.getsockname()[1], lambda: {"gateway": os.getpid()})
    yield made
    made.close()


def connect(link: Any, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection that has carried `hello`."""
    client = socket.create_connection(("127.0.0.1", link.port), timeout=60)
    client.sendall(b"hello")
    server, _ = listener.accept()
    server.settimeout(60)
    assert server.recv(5, socket.MSG_WAITALL) == b"hello"
    return client, server


def is_broken(client: socket.socket) -> bool:
    """Whether nothing more arrives. Blocks until then."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


def test_bytes_pass_and_the_source_has_a_name(link: Any, listener: socket.socket) -> None:
    client, server = connect(link, listener)
    with client, server:
        server.sendall(b"welcome")
        assert client.recv(7, socket.MSG_WAITALL) == b"welcome"
        assert link.sources == ["gateway"]


def test_a_cut_breaks_the_connections_of_its_source(links: Any, link: Any, listener: socket.socket) -> None:
    client, server = connect(link, listener)
    with client, server:
        link.set("draft-0", links.Weather(is_cut=True))
        server.sendall(b"x")
        assert client.recv(1) == b"x"
        link.set("gateway", links.Weather(is_cut=True))
        assert is_broken(client)
        with socket.create_connection(("127.0.0.1", link.port), timeout=60) as again:
            assert is_broken(again)
        link.set("gateway", links.FAIR)
    listener.accept()[0].close()  # of the connection that was cut at once
    for end in connect(link, listener):
        end.close()


def test_bytes_that_were_stopped_arrive_later(links: Any, link: Any, listener: socket.socket) -> None:
    client, server = connect(link, listener)
    with client, server:
        link.set("gateway", links.Weather(stops_answers=True))
        server.sendall(b"late")
        client.sendall(b"request")
        assert server.recv(7, socket.MSG_WAITALL) == b"request"
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(4)
        client.settimeout(60)
        link.set("gateway", links.FAIR)
        assert client.recv(4, socket.MSG_WAITALL) == b"late"


def test_a_repeated_connection_sends_the_same_bytes(link: Any, listener: socket.socket) -> None:
    client, server = connect(link, listener)
    with client, server:
        assert link.repeat("gateway", 0.0) == 1
        again, _ = listener.accept()
        with again:
            again.settimeout(60)
            assert again.recv(5, socket.MSG_WAITALL) == b"hello"
