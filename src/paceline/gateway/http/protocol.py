"""uvicorn's HTTP protocol with limits for clients that are slow, silent, greedy or ambiguous.

A request whose end two parsers could find at different bytes is refused: a proxy in front of this server must see the same
requests. httptools rejects most shapes (two lengths, bare line feeds, folded headers), and `find_ambiguity` the rest.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from paceline.gateway.auth import ConnectionLimits

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_HEADER_BYTES = 64 * 1024
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

    def __init__(self, *, limits: ConnectionLimits, client_timeout: float, **options: Any) -> None:
        super().__init__(**options)
        self._limits, self._client_timeout = limits, client_timeout
        self._address: str | None = None
        """The counted address; None if the connection was refused."""
        self._is_in_headers, self._header_bytes = True, 0
        self._problem = ""
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
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._limits.leave(self._address)
            self._address = None
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # refused: what it still sends is not read
            return
        self._lingering.is_receiving = True
        if self._is_in_headers:
            self._header_bytes += len(data)
            if self._read_timer is None:
                self._start_read_timer()
        super().data_received(data)
        if self._is_in_headers and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes: send fewer")

    # ---------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort_connection"] = self.transport.abort

    def on_headers_complete(self) -> None:
        self._is_in_headers, self._header_bytes = False, 0
        self._problem = find_ambiguity(self.url, self.headers, self.parser.get_http_version())
        if self._problem:
            raise ValueError(self._problem)  # httptools passes it on as a parser error: status 400
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_headers, self._lingering.is_receiving = True, False
        self._stop_read_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # a second status line would be read as a part of the first response
            return
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

    def _refuse(self, status: int, reason: str) -> None:
        """Sends a plain response and closes the connection, also if the client does not read it."""
        if self.transport.is_closing():
            return
        body = reason.encode()
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()


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
