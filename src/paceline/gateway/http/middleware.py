"""ASGI middleware that rejects a request before its route runs: foreign origins, missing keys, bad bodies.

`HostMiddleware` accepts only the names under which the server answers, against DNS rebinding. A web page of evil.example can
make its name resolve to this server's address. Its requests then have the server as their own origin, and only the `Host`
header, which names evil.example, differs from those of other clients.
"""

import asyncio
import ipaddress
import re
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.errors import InvalidConfig
from paceline.core.machine import measured
from paceline.gateway.api.errors import (
    ApiError,
    BodyTooLarge,
    Forbidden,
    Overloaded,
    SlowBody,
    UnsupportedEncoding,
    error_answer,
    log_refusal,
)
from paceline.gateway.auth import Access
from paceline.gateway.bodies import (
    BodyProcess,
    FairShare,
    check_characters,
    check_shape,
    owner_of,
)
from paceline.gateway.http.overload import OverloadManager
from paceline.gateway.metrics import Metrics
from paceline.gateway.sessions import Gateway

REJECTIONS = {401: "unauthorised", 403: "forbidden", 429: "wrong_keys"}
"""Reasons in the metrics, by status."""
ANY_ORIGIN = "*"
ORIGIN = re.compile(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?")
LARGE = 65536
"""Bytes from which a body is checked by another process, and then waits for its turn: parsing it takes milliseconds."""
BODY_MEMORY = 64 * 2**20
"""Bytes that all bodies take until their responses start, or eight of the largest body if that is more. An owner has a
quarter."""
MEMORY_WAIT = 10.0
"""Seconds that a body waits for memory."""
BODY_GRACE, BODY_RATE = 5.0, 32 * 1024
"""Seconds in which a body need not arrive, and bytes a second that must arrive from then on."""
COUNTED = (
    "overloaded",
    "slow_body",
    "too_large",
    "unsupported_encoding",
    "too_many_values",
    "too_deep",
    "invalid_json",
    "cpu_budget",
    "memory_large_bodies",
    "memory_new_requests",
)
"""Error codes that are reasons in the metrics too."""
JSON_TYPE = re.compile(rb"application/([^;\s]+\+)?json\s*(;|$)", re.IGNORECASE)


class AuthMiddleware:
    """Rejects requests without a valid key before it reads the body. Routes read the key with `request_key`."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                address = (scope.get("client") or ("",))[0]
                key = self._access.authenticate(route_path(scope), credentials(Headers(scope=scope)), address)
            except ApiError as error:
                self._metrics.record_rejection(REJECTIONS.get(error.status, "forbidden"))
                await reject(error, scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)


def credentials(headers: Headers) -> str:
    """The Authorization header, or the key in Anthropic's header in the same form."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


async def reject(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the error and closes the connection: its unread body would be read as the next request."""
    log_refusal(error, scope["path"])
    headers = {**error.headers, "connection": "close"}
    status, body = error_answer(error, route_path(scope))
    await JSONResponse(body, status, headers)(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path without that of a proxy in front of the server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


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
    """Rejects bodies that are too large, arrive too slowly, are not UTF-8, or have too many values.

    It takes the body's cost from the key's allowance before any work. A session that runs returns it and takes the exact one.
    The memory of a body is reserved before it is read, and keys share it. Another process checks large bodies, against the
    schema of their route too. The event loop parses those that passed, one at a time, and other requests run between two of
    them. A client that goes away before its response ends the work for it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        gateway: Gateway,
        limit: int,
        most_values: int,
        large: BodyProcess,
        overload: OverloadManager,
        has_keys: bool,
    ) -> None:
        """`gateway` charges keys for the bodies of all models, and `large` checks large bodies. On a server that `has_keys`, a
        path without a key takes no body."""
        self._app, self._gateway, self._limit, self._most_values = app, gateway, limit, most_values
        self._metrics, self._large, self._overload, self._has_keys = gateway.metrics, large, overload, has_keys
        memory = max(BODY_MEMORY, 8 * limit)
        self._memory = FairShare(memory, memory // 4)
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with ExitStack() as memory:
            try:
                body = await self._read(scope, receive, memory)
                if body:
                    scope["state"]["charge"] = self._gateway.limits.charge_body(scope["state"]["key"], len(body))
            except ApiError as error:
                await self._reject(error, scope, receive, send)
                return
            if body is None:
                self._metrics.record_rejection("disconnected")
                return
            if not body:
                await self._app(scope, _replay(body, receive), send)
                return
            with _Client(body, receive, memory) as client:
                try:
                    await self._check(scope, body)
                except ApiError as error:
                    await self._reject(error, scope, client.receive, client.sending(send))
                    return
                del body
                await self._app(scope, client.receive, client.sending(send))
            if client.was_cancelled:
                self._metrics.record_rejection("disconnected")

    async def _reject(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        reason = error.code if error.code in COUNTED else "rate_limited" if error.status == 429 else None
        if reason:
            self._metrics.record_rejection(reason)
        await reject(error, scope, receive, send)

    async def _check(self, scope: Scope, body: bytes) -> None:
        """Raises `ApiError`. Returns for a large body when no other one is parsed: its turn lasts until the caller waits."""
        if len(body) <= LARGE:
            measured(partial(self._gateway.charge_cpu, owner_of(scope), "body"), self._check_small, body)
            return
        is_json = JSON_TYPE.match(dict(scope["headers"]).get(b"content-type", b""))
        path = route_path(scope)
        await self._large.check(owner_of(scope), path if is_json else "", body)
        await self._turn.acquire()
        asyncio.get_running_loop().call_soon(self._turn.release)

    def _check_small(self, body: bytes) -> None:
        check_characters(body)
        check_shape(body, self._most_values)

    async def _read(self, scope: Scope, receive: Receive, memory: ExitStack) -> bytes | None:
        """The whole body; None if the client disconnected before its end. Closing `memory` gives it back."""
        headers = dict(scope["headers"])
        if (encoding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            raise UnsupportedEncoding(encoding.decode("latin-1"))
        limit = 0 if self._has_keys and not scope["state"]["key"].id else self._limit
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else 0
        if size > limit:
            raise BodyTooLarge(limit)
        reserved = min(limit, LARGE) if b"transfer-encoding" in headers else size
        if reserved:
            self._gateway.cpu.check(owner_of(scope))
            self._overload.check(reserved)
            await self._reserve(scope, reserved, memory)
        chunks, size, began = list[bytes](), 0, asyncio.get_running_loop().time()
        while True:
            try:
                async with asyncio.timeout_at(began + BODY_GRACE + size / BODY_RATE):
                    message = await receive()
            except TimeoutError:
                raise SlowBody(BODY_RATE) from None
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise BodyTooLarge(limit)
            if size > reserved:
                self._overload.check(limit)
                await self._reserve(scope, limit - reserved, memory)
                reserved = limit
            if not message.get("more_body"):
                return b"".join(chunks)

    async def _reserve(self, scope: Scope, amount: int, memory: ExitStack) -> None:
        try:
            async with asyncio.timeout(MEMORY_WAIT):
                memory.callback(await self._memory.enter(owner_of(scope), amount))
        except TimeoutError:
            raise Overloaded(1, "the bodies of other requests fill the memory for bodies") from None


class _Client:
    """A client whose body was read. Until its response starts, the block is cancelled when the client disconnects."""

    def __init__(self, body: bytes, receive: Receive, memory: ExitStack) -> None:
        """`memory`, which the body takes, is given back when the response starts."""
        self._first: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive, self._memory = receive, memory
        self._is_gone = asyncio.Event()
        self._is_answered = False
        self.was_cancelled = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._watcher = task, asyncio.create_task(self._watch())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._watcher.cancel()
        return self.was_cancelled and not self._task.uncancel() and kind is asyncio.CancelledError

    async def receive(self) -> Message:
        """The body, then the disconnect. The caller of the second call watches the client itself from then on."""
        message, self._first = self._first, None
        if message is not None:
            return message
        self._answer()
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    def sending(self, send: Send) -> Send:
        """`send`, whose first message ends the watch."""

        async def send_message(message: Message) -> None:
            self._answer()
            await send(message)

        return send_message

    def _answer(self) -> None:
        self._is_answered = True
        self._memory.close()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone.set()
        if not self._is_answered:
            self.was_cancelled = True
            self._task.cancel()


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


def parse_proxies(text: str | None) -> list[str]:
    """The addresses and networks of the setting `trusted_proxies`. Raises `InvalidConfig`."""
    proxies = [proxy.strip() for proxy in (text or "").split(",") if proxy.strip()]
    for proxy in proxies:
        try:
            ipaddress.ip_network(proxy)
        except ValueError:
            raise InvalidConfig(f"trusted_proxies: {proxy!r} is no address or network; write 10.0.0.0/8") from None
    return proxies


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
