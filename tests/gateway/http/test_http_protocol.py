"""Clients that are slow, silent, greedy or ambiguous, against the protocol on a real socket."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn

from paceline.gateway.auth.rate_limit import ConnectionLimits, network_of
from paceline.gateway.http.protocol import MAX_HEADER_BYTES, LimitedProtocol, find_ambiguity

HOST = b"Host: a\r\n"
GET = b"GET / HTTP/1.1\r\n" + HOST + b"\r\n"
TIMEOUT = 0.3
MAX_TAKEN = 1 << 20
"""Bytes within which the server must notice framing without an end."""


class App:
    """Answers with the body it got; `/large` with 64 MB, `/held` when the test sets `release`."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.release = threading.Event()
        self.disconnected = threading.Event()
        self.refusals: list[str] = []
        """Reasons that the protocol records."""
        self.headers: list[list[tuple[bytes, bytes]]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["path"] == "/refused":  # before the body
            await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"too large"})
            return
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        self.headers.append(scope["headers"])
        while scope["path"] == "/held" and not self.release.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64 if scope["path"] == "/large" else 0):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        for _ in range(2 if scope["path"] == "/parts" else 0):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        if scope["path"] == "/large" and (await receive())["type"] == "http.disconnect":
            self.disconnected.set()
        await send({"type": "http.response.body", "body": body})


@contextmanager
def running(app: App, in_all: int = 100, per_address: int = 100, timeout: float = TIMEOUT) -> Iterator[int]:
    """The port of a server of `app`."""
    limits = ConnectionLimits(in_all, per_address)
    protocol: Any = partial(LimitedProtocol, limits=limits, client_timeout=timeout, record=app.refusals.append)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", log_config=None, lifespan="off"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[App, int]]:
    app = App()
    with running(app, timeout=60.0) as port:
        yield app, port


@pytest.fixture(scope="module")
def impatient() -> Iterator[tuple[App, int]]:
    """A server for clients that are too slow."""
    app = App()
    with running(app) as port:
        yield app, port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def answer(port: int, data: bytes) -> bytes:
    """Everything the server sends until it closes the connection."""
    with connect(port) as client:
        client.sendall(data)
        return read_all(client)


def read_all(client: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            part = client.recv(65536)
        except ConnectionResetError:
            return received
        if not part:
            return received
        received += part


def post(headers: bytes, body: bytes = b"abc", line: bytes = b"POST / HTTP/1.1\r\n") -> bytes:
    return line + headers + b"\r\n" + body


CHUNKED = b"0\r\n\r\n"
AMBIGUOUS = {
    "two lengths": post(HOST + b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abcd"),
    "the same length twice": post(HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n"),
    "a list of lengths": post(HOST + b"Content-Length: 3, 3\r\n"),
    "a signed length": post(HOST + b"Content-Length: +3\r\n"),
    "length and encoding": post(HOST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", CHUNKED),
    "encoding and length": post(HOST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n", CHUNKED),
    "another encoding": post(HOST + b"Transfer-Encoding: xchunked\r\n", CHUNKED),
    "two encodings": post(HOST + b"Transfer-Encoding: gzip, chunked\r\n", CHUNKED),
    "an encoding in HTTP/1.0": post(HOST + b"Transfer-Encoding: chunked\r\n", CHUNKED, b"POST / HTTP/1.0\r\n"),
    "an underscore": post(HOST + b"Transfer_Encoding: chunked\r\nContent-Length: 3\r\n"),
    "a space before the colon": post(HOST + b"Content-Length : 3\r\n"),
    "bare line feeds": b"POST / HTTP/1.1\nHost: a\nContent-Length: 3\n\nabc",
    "one bare line feed": b"POST / HTTP/1.1\r\nHost: a\nContent-Length: 3\r\n\r\nabc",
    "a bare carriage return": b"POST / HTTP/1.1\r\nHost: a\rX: b\r\nContent-Length: 3\r\n\r\nabc",
    "a folded header": post(HOST + b"X: b\r\n c\r\nContent-Length: 3\r\n"),
    "a folded encoding": post(HOST + b"Transfer-Encoding:\r\n chunked\r\n", CHUNKED),
    "a zero byte": post(HOST + b"X: \0b\r\nContent-Length: 3\r\n"),
    "no host": post(b"Content-Length: 3\r\n"),
    "two hosts": post(HOST + b"Host: b\r\nContent-Length: 3\r\n"),
    "a target with another host": post(HOST + b"Content-Length: 3\r\n", line=b"POST http://evil/x HTTP/1.1\r\n"),
    "a tunnel": post(HOST, b"", b"CONNECT a:1 HTTP/1.1\r\n"),
    "HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2 by name": post(HOST, b"", b"GET / HTTP/2.0\r\n"),
    "a chunk that ends with a line feed": post(HOST + b"Transfer-Encoding: chunked\r\n", b"3\nabc\r\n0\r\n\r\n"),
    "a length in a trailer": post(HOST + b"Transfer-Encoding: chunked\r\n", b"0\r\nContent-Length: 5\r\n\r\n"),
}


@pytest.mark.parametrize("data", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_request_is_refused(data: bytes, server: tuple[App, int]) -> None:
    app, port = server
    app.bodies.clear()
    received = answer(port, data + GET)
    assert received.startswith(b"HTTP/1.1 400"), received
    assert received.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in received
    assert not [body for body in app.bodies if body]


def test_plain_and_chunked_requests_pass(server: tuple[App, int]) -> None:
    _, port = server
    close = HOST + b"Connection: close\r\n"
    assert answer(port, post(close + b"Content-Length: 3\r\n")).endswith(b"3\r\nabc\r\n0\r\n\r\n")
    chunked = post(close + b"Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert b"abcde" in answer(port, chunked)
    assert answer(port, post(close, b"", b"GET http://a/x HTTP/1.1\r\n")).startswith(b"HTTP/1.1 200")


def test_headers_have_a_limit_of_bytes_and_of_number(server: tuple[App, int]) -> None:
    _, port = server
    assert answer(port, b"GET / HTTP/1.1\r\nX: " + b"x" * (2 * MAX_HEADER_BYTES)).startswith(b"HTTP/1.1 431")
    assert answer(port, post(HOST + b"X: y\r\n" * 200, b"")).startswith(b"HTTP/1.1 400")
    assert find_ambiguity(b"/", [(b"host", b"a"), (b"x", b"x" * MAX_HEADER_BYTES)], "1.1")


CHUNKS = post(HOST + b"Transfer-Encoding: chunked\r\n", b"")
ENDLESS = {
    "trailers": (CHUNKS + b"0\r\n", b"X: " + b"y" * 60000 + b"\r\n"),
    "the value of a trailer": (CHUNKS + b"0\r\nX: ", b"y" * 65536),
    "the name of a trailer": (CHUNKS + b"0\r\n", b"y" * 65536),
    "the extensions of a chunk": (CHUNKS + b"1;", b"x" * 65536),
    "extensions of every chunk": (CHUNKS, b"1;" + b"x" * 900 + b"\r\na\r\n"),
}


@pytest.mark.parametrize(("head", "part"), ENDLESS.values(), ids=ENDLESS)
def test_framing_that_does_not_end_is_refused(head: bytes, part: bytes, server: tuple[App, int]) -> None:
    app, port = server
    app.refusals.clear()
    with connect(port) as client, suppress(ConnectionError):
        client.sendall(head)
        for _ in range(2 * MAX_TAKEN // len(part)):
            client.sendall(part)
            if app.refusals:
                break
        assert read_all(client).startswith(b"HTTP/1.1 400")
    assert app.refusals == ["malformed"]


def test_trailers_are_no_headers(server: tuple[App, int]) -> None:
    app, port = server
    trailers = b"Authorization: Bearer x\r\n"
    chunked = post(
        HOST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n", b"3\r\nabc\r\n0\r\n" + trailers + b"\r\n"
    )
    assert b"abc" in answer(port, chunked)
    assert b"authorization" not in dict(app.headers[-1])


def test_small_chunks_pass(server: tuple[App, int]) -> None:
    _, port = server
    body = b"1\r\na\r\n" * 50_000
    head = HOST + b"Connection: close\r\nTransfer-Encoding: chunked\r\n"
    assert answer(port, post(head, body + b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")


def test_http_1_0_gets_no_chunks(server: tuple[App, int]) -> None:
    _, port = server
    received = answer(port, post(HOST + b"Content-Length: 3\r\n", line=b"POST / HTTP/1.0\r\n"))
    assert received.startswith(b"HTTP/1.1 200")
    assert b"chunked" not in received
    assert received.endswith(b"\r\n\r\nabc")
    assert answer(port, post(HOST, b"", line=b"GET /parts HTTP/1.0\r\n")).endswith(b"\r\n\r\npartpart")


def test_headers_that_do_not_end_are_refused(impatient: tuple[App, int]) -> None:
    _, port = impatient
    started = time.monotonic()
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 408")
    assert TIMEOUT * 0.9 < time.monotonic() - started < 5


def test_a_byte_at_a_time_does_not_extend_the_time(impatient: tuple[App, int]) -> None:
    _, port = impatient
    started, received = time.monotonic(), b""
    with connect(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: ")
        client.settimeout(0.02)
        while not received and time.monotonic() < started + 5:
            client.sendall(b"y")
            with suppress(TimeoutError):
                received = client.recv(100)
    assert received.startswith(b"HTTP/1.1 408")


def test_a_silent_connection_is_closed(impatient: tuple[App, int]) -> None:
    _, port = impatient
    with connect(port) as client:
        assert read_all(client) == b""


def test_a_body_that_does_not_end_is_refused(impatient: tuple[App, int]) -> None:
    app, port = impatient
    app.bodies.clear()
    with connect(port) as client:
        client.sendall(post(HOST + b"Content-Length: 100\r\n", b"half"))
        assert read_all(client).startswith(b"HTTP/1.1 408")
    assert app.bodies == []


def test_a_long_request_is_not_slow_sending() -> None:
    app = App()
    with running(app) as port, connect(port) as client:
        client.sendall(b"GET /held HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
        client.settimeout(3 * TIMEOUT)
        with pytest.raises(TimeoutError):
            client.recv(100)
        app.release.set()
        client.settimeout(10)
        assert read_all(client).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_disconnected() -> None:
    app = App()
    with running(app) as port, connect(port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n")
        assert app.disconnected.wait(10)


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\nHost: a\0\r\n\r\n", post(HOST + b"Content-Length: x\r\n")])
def test_a_refusal_follows_the_responses_before_it(bad: bytes, server: tuple[App, int]) -> None:
    """In one read, so that the refusal comes while the first request is answered."""
    received = answer(server[1], post(HOST + b"Content-Length: 3\r\n") + GET + bad)
    statuses = [line.split()[1] for line in received.splitlines() if line.startswith(b"HTTP/1.1 ")]
    assert statuses == [b"200", b"200", b"400"]


def test_the_request_before_a_pipelined_one_learns_of_a_disconnect() -> None:
    app = App()
    with running(app, timeout=60.0) as port:
        with connect(port) as client:
            client.sendall(b"GET /large HTTP/1.1\r\n" + HOST + b"\r\n" + GET)
            assert client.recv(12) == b"HTTP/1.1 200"
        assert app.disconnected.wait(20)


def test_a_client_that_still_sends_gets_its_refusal(server: tuple[App, int]) -> None:
    _, port = server
    line = b"POST /refused HTTP/1.1\r\n"
    received = answer(port, post(HOST + b"Content-Length: 8000000\r\n", bytes(8_000_000), line))
    assert received.startswith(b"HTTP/1.1 413")
    assert b"too large" in received


def test_connections_of_one_address_are_limited() -> None:
    app = App()
    with running(app, per_address=2, timeout=30) as port:
        first, second = connect(port), connect(port)
        for client in (first, second):  # busy: they are not closed in favour of others
            client.sendall(b"GET /held HTTP/1.1\r\n" + HOST + b"\r\n")
        while len(app.bodies) < 2:
            time.sleep(0.001)
        assert answer(port, GET).startswith(b"HTTP/1.1 503")
        first.close()
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with connect(port) as third:
                third.sendall(GET)
                if third.recv(100).startswith(b"HTTP/1.1 200"):
                    break
        else:
            pytest.fail("a closed connection still counts")
        app.release.set()
        second.close()


def is_closed(client: socket.socket) -> bool:
    client.settimeout(10)
    try:
        return client.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("limit", ["in_all", "per_address"])
def test_the_oldest_idle_connection_makes_room(limit: str) -> None:
    """Idle are connections that have sent nothing, and those whose response is complete. Others stay."""
    app = App()
    with running(app, timeout=30, **{limit: 3}) as port:
        served, held = connect(port), connect(port)
        for client, path in ((served, b"/"), (held, b"/held")):
            client.sendall(b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n")
        assert served.recv(1000).startswith(b"HTTP/1.1 200")
        while len(app.bodies) < 2:
            time.sleep(0.001)
        silent = [connect(port) for _ in range(3)]
        assert is_closed(served)
        assert is_closed(silent[0])
        app.release.set()
        assert held.recv(1000).startswith(b"HTTP/1.1 200")
        assert "idle_connections" in app.refusals
        assert "connections" not in app.refusals
        for client in (served, held, *silent):
            client.close()


def test_limits_close_idle_connections_of_the_same_address() -> None:
    limits, closed = ConnectionLimits(in_all=4, per_address=2), list[int]()

    def idle(number: int, address: str) -> None:
        assert limits.enter(address)

        def close() -> None:
            closed.append(number)
            limits.leave(address)

        limits.set_idle(address, close)

    for number, address in enumerate(["10.0.0.1", "10.0.0.2", "10.0.0.2"]):
        idle(number, address)
    assert limits.enter("10.0.0.2")  # a third of this address: not the oldest of all is closed
    assert closed == [1]
    assert limits.enter("10.0.0.3")
    assert limits.enter("10.0.0.4")
    assert closed == [1, 0]
    assert limits.enter("10.0.0.5")
    assert not limits.enter("10.0.0.6")
    assert (closed, limits._num_open, len(limits._open)) == ([1, 0, 2], 4, 4)


def test_limits_count_networks() -> None:
    limits = ConnectionLimits(in_all=3, per_address=2)
    assert limits.enter("10.0.0.1")
    assert limits.enter("10.0.0.1")
    assert not limits.enter("10.0.0.1")
    assert limits.enter("10.0.0.2")
    assert not limits.enter("10.0.0.3")  # all
    limits.leave("10.0.0.1")
    assert limits.enter("10.0.0.1")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("") == ""
