"""ASGI middleware that rejects a request before its route runs: foreign origins, missing keys, bad bodies.

`HostMiddleware` accepts only the names under which the server answers, against DNS rebinding. A web page of evil.example can
make its name resolve to this server's address. Its requests then have the server as their own origin, and only the `Host`
header, which names evil.example, differs from those of other clients.
"""

import asyncio
import ipaddress
import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import InvalidConfig
from paceline.gateway.api.errors import ApiError, BodyTooLarge, Forbidden, UnsupportedEncoding, log_refusal
from paceline.gateway.auth import Access, RateLimits
from paceline.gateway.bodies import BodyProcess, check_characters, check_shape
from paceline.gateway.metrics import Metrics

REJECTIONS = {401: "unauthorised", 403: "forbidden", 429: "wrong_keys"}
"""Reasons in the metrics, by status."""
ANY_ORIGIN = "*"
ORIGIN = re.compile(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?")
LARGE = 65536
"""Bytes from which a body is checked by another process, and then waits for its turn: parsing it takes milliseconds."""
JSON_TYPE = re.compile(rb"application/([^;\s]+\+)?json\s*(;|$)", re.IGNORECASE)


class AuthMiddleware:
    """Rejects requests without a valid key before it reads the body. Routes read the key with `request_key`."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                address = (scope.get("client") or ("",))[0]
                key = self._access.authenticate(path, Headers(scope=scope).get("authorization", ""), address)
            except ApiError as error:
                self._metrics.record_rejection(REJECTIONS.get(error.status, "forbidden"))
                await reject(error, scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)


async def reject(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error and closes the connection: its unread body would be read as the next request."""
    log_refusal(error, scope["path"])
    headers = {**error.headers, "connection": "close"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)


def parse_origins(text: str | None) -> tuple[str, ...]:
    """The origins of the setting `cors_origins`. Raises `InvalidConfig`."""
    origins = tuple(origin.strip().lower() for origin in (text or "").split(",") if origin.strip())
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"cors_origins: {origin!r} is not an origin; write https://app.example.com, or {ANY_ORIGIN}"
            )
    return origins


class OriginMiddleware:
    """Rejects requests of web pages from other origins, except those in `cors_origins`.

    A request without an `Origin` header passes. CORS alone only hides the response: the request would still run.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], metrics: Metrics) -> None:
        self._app, self._origins, self._metrics = app, frozenset(origins), metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._is_allowed(origin.lower(), headers.get("host", "").lower()):
                self._metrics.record_rejection("foreign_origin")
                error = Forbidden(
                    f"pages from {origin[:200]} may not call this server: add it to `cors_origins`",
                    code="foreign_origin",
                )
                await reject(error, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, origin: str, host: str) -> bool:
        """Compares the host only: a TLS proxy forwards `Host` but not the scheme."""
        is_own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        return is_own or origin in self._origins or ANY_ORIGIN in self._origins


class BodyMiddleware:
    """Rejects bodies that are too large, have too many values or contain half a surrogate pair.

    It takes the body's cost from the key's allowance before any work. A session that runs returns it and takes the exact one.
    Another process checks large bodies, against the schema of their route too. The event loop parses those that passed, one at
    a time, and other requests run between two of them.
    """

    def __init__(
        self, app: ASGIApp, limit: int, limits: RateLimits, most_values: int, metrics: Metrics, large: BodyProcess
    ) -> None:
        """`large` checks large bodies."""
        self._app, self._limit, self._limits, self._most_values = app, limit, limits, most_values
        self._metrics, self._large = metrics, large
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            if (encoding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
                raise UnsupportedEncoding(encoding.decode("latin-1"))
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > self._limit:
                raise BodyTooLarge(self._limit)
            body = await self._read(receive)
            if body is None:
                return
            if body:
                scope["state"]["charge"] = self._limits.charge_body(scope["state"]["key"], len(body))
                await self._check(scope, body)
        except ApiError as error:
            if error.status == 429:
                self._metrics.record_rejection("rate_limited")
            await reject(error, scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _check(self, scope: Scope, body: bytes) -> None:
        """Raises `ApiError`. Returns for a large body when no other one is parsed: its turn lasts until the caller waits."""
        if len(body) <= LARGE:
            check_shape(body, self._most_values)
            check_characters(body)
            return
        is_json = JSON_TYPE.match(dict(scope["headers"]).get(b"content-type", b""))
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        await self._large.check(path if is_json else "", body)
        await self._turn.acquire()
        asyncio.get_running_loop().call_soon(self._turn.release)

    async def _read(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnected before its end."""
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limit:
                raise BodyTooLarge(self._limit)
            if not message.get("more_body"):
                return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the whole body first."""
    first: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive_again() -> Message:
        nonlocal first
        message, first = first, None
        return message or await receive()

    return receive_again


ANY_HOST = "*"
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_LOCAL_ENDINGS = ("localhost", "local", "internal", "svc", "cluster.local", "home.arpa", "test")
"""Ends of names that no public name server answers for."""


def parse_hosts(text: str | None) -> tuple[str, ...]:
    """The names of the setting `allowed_hosts`. Raises `InvalidConfig`."""
    hosts = tuple(host.strip().lower() for host in (text or "").split(",") if host.strip())
    for host in hosts:
        if host != ANY_HOST and not _NAME.fullmatch(host) and not _is_address(host):
            raise InvalidConfig(
                f"allowed_hosts: {host!r} is not a host name; write api.example.com, *.example.com, or {ANY_HOST}"
            )
    return hosts


def is_allowed(host: str, hosts: tuple[str, ...], has_keys: bool) -> bool:
    """Whether a request with this `Host` header may pass. Without `hosts`, a server with keys accepts every name: a foreign
    page has no key."""
    name = _without_port(host.lower())
    if ANY_HOST in hosts or (has_keys and not hosts):
        return True
    if _is_address(name) or name == "localhost":
        return True
    if hosts:
        return any(name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:])) for pattern in hosts)
    return "." not in name or any(name.endswith(f".{end}") for end in _LOCAL_ENDINGS)


class HostMiddleware:
    """Rejects requests under a name that is not the server's."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], has_keys: bool, metrics: Metrics) -> None:
        self._app, self._hosts, self._has_keys, self._metrics = app, hosts, has_keys, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not is_allowed(host, self._hosts, self._has_keys):
                self._metrics.record_rejection("unknown_host")
                error = Forbidden(
                    f"this server does not answer as {host[:200]!r}: add the name to `allowed_hosts`",
                    code="unknown_host",
                )
                await reject(error, scope, receive, send)
                return
        await self._app(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
