"""uvicorn's HTTP protocol with limits for clients that are slow, silent, greedy or ambiguous.

A request whose end two parsers could find at different bytes is refused: a proxy in front of this server must see the same
requests. httptools rejects most shapes (two lengths, bare line feeds, folded headers), and `find_ambiguity` the rest.

The bytes of a chunked body that are no content (lengths and extensions of chunks, trailers) are limited too. Trailers are
dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from paceline.gateway.auth import ConnectionLimits

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
FRAMING_BYTES = 16 * 1024
"""Bytes of a chunked body between two pieces of content, and after the last one. One read from the socket may exceed it."""
FRAMING_PER_BYTE = 8
"""Such bytes in all for each byte of content: chunks of one byte have five."""
REFUSALS = {400: "malformed", 408: "slow_client", 431: "malformed", 503: "connections"}
"""Reasons in the metrics, by status."""
LINGER_SECONDS = 2.0
"""Time that a refused client has to finish sending and to read the refusal."""


class LingeringTransport:
    """A transport whose `close` ends only the sending side while the client still sends, and closes the rest later.

    A socket that is closed with unread data resets the connection, and the client loses the response that it did not read yet.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self.is_receiving = False
        """Whether the client has not sent all of a request."""
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self.is_receiving or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.abort)


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `client_timeout` limits the headers, the body, and each pause in which the client reads nothing."""

    def __init__(
        self, *, limits: ConnectionLimits, client_timeout: float, record: Callable[[str], None], **options: Any
    ) -> None:
        """`record` receives the reason of every refusal."""
        super().__init__(**options)
        self._limits, self._client_timeout, self._record = limits, client_timeout, record
        self._address: str | None = None
        """The counted address; None if the connection was refused."""
        self._is_in_headers, self._header_bytes = True, 0
        self._content_bytes = self._framing_bytes = self._framing_since_content = 0
        """Of the body that arrives."""
        self._problem = ""
        self._served: RequestResponseCycle | None = None
        """The request whose response is next: `cycle` is the one that was read last."""
        self._refusal: tuple[int, str] | None = None
        """Status and reason of a refusal that waits for the responses before it."""
        self._lingering: LingeringTransport
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self.loop)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        address = self.client[0] if self.client else ""
        if not self._limits.enter(address):
            self._refuse(503, "too many connections: close some, or retry later")
            return
        self._address = address
        self._limits.set_idle(address, self._end_idle)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:  # uvicorn tells only the last request
            self._served.disconnected = True
            self._served.message_event.set()

    def _leave(self) -> None:
        self._limits.set_busy(self._end_idle)
        if self._address is not None:
            self._limits.leave(self._address)
            self._address = None

    def _end_idle(self) -> None:
        """Closes a connection without a request in favour of a new one."""
        self._record("idle_connections")
        self._leave()
        self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and not self._owes_response:
            self._refuse(*self._refusal)
        is_next = self.cycle is not None and not self.cycle.response_complete
        if self._address is not None and not is_next and self._is_in_headers and not self._header_bytes:
            self._limits.set_idle(self._address, self._end_idle)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:  # what it still sends is not read
            return
        self._lingering.is_receiving = True
        self._limits.set_busy(self._end_idle)
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._read_timer is None:
                self._start_read_timer()
        content = 0 if self._is_in_headers else self._content_bytes
        is_body = not self._is_in_headers
        super().data_received(data)
        if self._is_in_headers:
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes: send fewer")
        elif is_body:
            self._limit_framing(len(data), self._content_bytes - content)

    def _limit_framing(self, num_bytes: int, content: int) -> None:
        """Refuses a body with too many bytes that are no content. `num_bytes` arrived, and `content` of them are content."""
        self._framing_bytes += num_bytes - content
        self._framing_since_content = 0 if content else self._framing_since_content + num_bytes
        most = FRAMING_BYTES + FRAMING_PER_BYTE * self._content_bytes
        if self._framing_since_content > FRAMING_BYTES or self._framing_bytes > most:
            self._refuse(
                400, "the chunks of the body have too long extensions or trailers: send larger chunks, without them"
            )

    # ---------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self.transport.abort

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # otherwise a trailer
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._content_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._header_bytes = False, 0
        self._content_bytes = self._framing_bytes = self._framing_since_content = 0
        self._problem = find_ambiguity(self.url, self.headers, self.parser.get_http_version())
        if self._problem:
            raise ValueError(self._problem)  # httptools passes it on as a parser error: status 400
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers, self._lingering.is_receiving = True, False
        self._stop_read_timer()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, self._problem or msg)

    # ---------------------------------------------------------------- time limits

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._client_timeout, self._end_unread)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _end_unread(self) -> None:
        logger.info("closed a connection: the client read nothing for %g s", self._client_timeout)
        self.transport.abort()

    def _start_read_timer(self) -> None:
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(self._client_timeout, self._end_unsent)

    def _end_unsent(self) -> None:
        self._read_timer = None
        is_busy = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if is_busy or self.flow.read_paused:  # the client waits for a response: a pipelined request has time
            self._start_read_timer()
        elif self._is_in_headers and not self._header_bytes:
            self.transport.abort()  # it has sent nothing
        else:
            part = "headers" if self._is_in_headers else "body"
            self._refuse(408, f"the {part} did not arrive within {self._client_timeout:g} seconds")

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @property
    def _owes_response(self) -> bool:
        """Whether a request that arrived whole waits for its response, or for the rest of it."""
        return self._served is not None and not self._served.response_complete and not self._served.more_body

    def _refuse(self, status: int, reason: str) -> None:
        """Sends a plain response, after those of the requests before, and closes the connection, also if the client does not
        read it."""
        if self.transport.is_closing():
            return
        if self._owes_response:
            self._refusal = status, reason
            return
        if self._served is not None and self._served.response_started and not self._served.response_complete:
            self.transport.abort()  # a second status line would be read as a part of the first response
            return
        self._record(REFUSALS[status])
        body = reason.encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


def _without_chunks(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app`, whose responses end with their connection if they have no length: HTTP/1.0 has no chunks."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            if message["type"] == "http.response.start":
                cycle.chunked_encoding = False
            else:
                cycle.expected_content_length = len(message.get("body", b""))  # uvicorn counts it down
            await send(message)

        await app(scope, receive, send_plain)

    return call


def find_ambiguity(url: bytes, headers: Sequence[tuple[bytes, bytes]], version: str) -> str:
    """Why two parsers may disagree about this request; empty if they cannot. `headers` have lower-case names."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    if version not in ("1.0", "1.1"):
        return "HTTP versions other than 1.0 and 1.1 are not supported"
    if len(headers) > MAX_HEADERS or sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        return f"more than {MAX_HEADERS} headers, or {MAX_HEADER_BYTES} bytes of them: send fewer"
    hosts = values.get(b"host", [])
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return "a request needs one Host header"
    codings, lengths = values.get(b"transfer-encoding", []), values.get(b"content-length", [])
    if codings and (lengths or version == "1.0" or [coding.lower() for coding in codings] != [b"chunked"]):
        return "Transfer-Encoding must be `chunked`, in HTTP/1.1, without Content-Length"
    if len(lengths) > 1:
        return "a request has one Content-Length at most"
    if b"transfer_encoding" in values or b"content_length" in values:
        return "a header with an underscore looks like Transfer-Encoding or Content-Length"
    return _find_target_ambiguity(url, hosts)


def _find_target_ambiguity(url: bytes, hosts: Sequence[bytes]) -> str:
    if url.startswith(b"/") or url == b"*":
        return ""
    parts = urlsplit(url)
    if parts.scheme in (b"http", b"https") and [parts.netloc.lower()] == [host.lower() for host in hosts]:
        return ""
    return "the request target must be a path, or a URL with the host of the Host header"
