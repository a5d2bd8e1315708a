"""Pages of other origins. Closed by default: a browser that runs somebody else's page is refused, and not only kept from
reading the answer, since a request may do harm that nobody reads about."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import InvalidConfig
from paceline.server.auth.middleware import refuse
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import Forbidden

ANY = "*"
ORIGIN = re.compile(r"https?://([\w.-]+|\[[0-9a-f:]+\])(:\d+)?")


def parse_origins(text: str | None) -> tuple[str, ...]:
    """The setting `cors_origins`. Raises `InvalidConfig`."""
    origins = tuple(one.strip().lower() for one in (text or "").split(",") if one.strip())
    for origin in origins:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"cors_origins: {origin!r} is no origin; write it like https://app.example.com, or {ANY}"
            )
    return origins


class OriginCheck:
    """Lets through what no page sent, what our own page sent, and the allowed origins."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...], metrics: Metrics) -> None:
        self._app, self._origins, self._metrics = app, frozenset(origins), metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not self._allows(origin.lower(), headers.get("host", "").lower()):
                self._metrics.rejected("foreign_origin")
                problem = Forbidden(
                    f"pages of {origin[:200]} may not call this server: add it to `cors_origins`", code="foreign_origin"
                )
                await refuse(problem, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, origin: str, host: str) -> bool:
        """Whoever ends TLS in front of us passes `Host` on, but not the scheme: the host alone tells our own page."""
        own = bool(host) and origin in (f"http://{host}", f"https://{host}")
        return own or origin in self._origins or ANY in self._origins
