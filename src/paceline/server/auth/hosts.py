"""The names under which the server answers, against DNS rebinding.

A web page of evil.example can make its name resolve to this server's address. Its requests then have the server as their own
origin, and only the `Host` header, which names evil.example, differs from those of other clients.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import InvalidConfig
from paceline.server.auth.middleware import reject
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import Forbidden

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
