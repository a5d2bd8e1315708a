"""The bytes of a connection, through the gateway's HTTP protocol.

What the application sees must not depend on how the network cuts the bytes, and must be what h11, another parser, sees: a
proxy in front of the server may use it.
"""

import asyncio
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState

from paceline.gateway.auth.rate_limit import ConnectionLimits
from paceline.gateway.http.protocol import LimitedProtocol
from tests.fuzz.mutations import text_mutator
from tests.fuzz.target import FuzzTarget

Seen = list[tuple[str, bytes, bytes]]
"""Method, target and body of the requests that arrived whole."""
FRAGMENTS = (
    *("\r\n", "\n", "\r", "\r\n\r\n", ": ", " ", "\t", "\0", "\xff", "0\r\n\r\n", "5;a=b\r\nhello\r\n", "ffffffff\r\n"),
    *(
        "Host: a\r\n",
        "Content-Length: 3\r\n",
        "Content-Length: -1\r\n",
        "Content-Length: 3, 3\r\n",
        "Content_Length: 3\r\n",
    ),
    *("Transfer-Encoding: chunked\r\n", "Transfer-Encoding: identity, chunked\r\n", "Transfer-Encoding : chunked\r\n"),
    *(
        "Connection: close\r\n",
        "Connection: upgrade\r\n",
        "Upgrade: h2c\r\n",
        "Expect: 100-continue\r\n",
        " folded\r\n",
    ),
    *(
        "GET / HTTP/1.1\r\n",
        "POST /x HTTP/1.1\r\n",
        "GET / HTTP/1.0\r\n",
        "CONNECT a:1 HTTP/1.1\r\n",
        "HTTP/2.0",
        "HTTP/1.9",
    ),
    *(
        "GET http://a/ HTTP/1.1\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
    ),
)


class TimelessLoop(asyncio.SelectorEventLoop):
    """A loop whose timers never fire: no input depends on time."""

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(self.time() + delay, callback, args, self, context)


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_closed = self.is_paused = self.is_ended = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.is_ended, f"{bytes(data)!r} is sent after the last response"
        if not self.is_closed:
            self.sent += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_ended = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


loop = TimelessLoop()


def serve(parts: Sequence[bytes]) -> tuple[Seen, bytes]:
    """The requests that the application got from a connection with these reads, and what the server sent."""
    seen: Seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        path: bytes = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        seen.append((scope["method"], path, body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def run() -> bytes:
        config = uvicorn.Config(app, http=LimitedProtocol, ws="none", log_config=None, lifespan="off")  # type: ignore[arg-type]
        config.load()
        state, transport = ServerState(), FakeTransport()
        protocol = LimitedProtocol(
            limits=ConnectionLimits(9, 9),
            client_timeout=30.0,
            record=lambda reason: None,
            config=config,
            server_state=state,
            app_state={},
            _loop=loop,
        )
        protocol.connection_made(transport)
        for part in parts:
            if transport.is_closed:
                break
            protocol.data_received(part)
            await _settle()
            for _ in range(1000):
                if not transport.is_paused:
                    break
                await asyncio.sleep(0)
            assert not transport.is_paused, "the connection is never read again"
        sent = bytes(transport.sent)
        protocol.connection_lost(None)
        for _ in range(1000):
            if not state.tasks:
                break
            await asyncio.sleep(0)
        assert not state.tasks, "a request goes on after its connection"
        assert not state.connections
        return sent

    return seen, loop.run_until_complete(run())


async def _settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def reference(data: bytes) -> Seen:
    """The requests that h11 finds before its first error."""
    connection, seen = h11.Connection(h11.SERVER), Seen()
    connection.receive_data(data)
    method, target, body = "", b"", b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, target, body = event.method.decode(), event.target, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                seen.append((method, target, body))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                return seen
    except h11.ProtocolError:
        return seen


def fuzz(data: bytes) -> bool:
    rng = Random(zlib.crc32(data))
    whole, sent = serve([data])
    at = rng.randrange(len(data) + 1)
    for parts in ([data[:at], data[at:]], [data[i : i + 1] for i in range(min(len(data), 512))] + [data[512:]]):
        again, other = serve([part for part in parts if part])
        assert again == whole, f"{parts} gives {again}, not {whole}"
        assert other == sent, f"{parts} is answered by {other!r}, not {sent!r}"
    for ours, theirs in zip(whole, reference(data), strict=False):
        target = theirs[1]
        if b"://" in target:  # the path of a URL
            target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
        expected = theirs[0], target.partition(b"#")[0], theirs[2]
        assert ours == expected, f"h11 reads {expected}, not {ours}"
    return bool(whole)


TARGETS = {"http": FuzzTarget(fuzz, text_mutator(FRAGMENTS), 2048)}
