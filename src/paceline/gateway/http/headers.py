"""Headers of every response: the id of its request, and what is left of the allowances of its key."""

import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.gateway.api.errors import MESSAGES_PATH, is_under
from paceline.gateway.auth import RateLimits
from paceline.gateway.http.middleware import route_path

REQUEST_ID = "x-request-id"
CLAUDE_REQUEST_ID = "request-id"
"""The name that clients of Anthropic's API read."""
TOKEN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Ids of clients that are taken over. Others could be anything, in logs too."""
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)


class ResponseHeaders:
    """Adds the headers to every response of an application."""

    def __init__(self, app: ASGIApp, limits: RateLimits) -> None:
        self._app, self._limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if TOKEN.fullmatch(given) else f"req_{secrets.token_hex(12)}"

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = {REQUEST_ID: request_id, **self._allowances(scope)}
                if is_under(route_path(scope), MESSAGES_PATH):
                    added[CLAUDE_REQUEST_ID] = request_id
                encoded = [(name.encode(), value.encode()) for name, value in added.items()]
                message = {**message, "headers": [*message.get("headers", ()), *encoded]}
            await send(message)

        await self._app(scope, receive, send_headers)

    def _allowances(self, scope: Scope) -> dict[str, str]:
        """What is left for the key of this request, and when all of it is available again. Empty for a key without limits."""
        key = scope.get("state", {}).get("key")
        if key is None:
            return {}
        return {
            f"x-ratelimit-{name}-{left.unit}": value
            for left in self._limits.left(key)
            for name, value in (
                ("limit", str(left.limit)),
                ("remaining", str(left.remaining)),
                ("reset", duration(left.reset_seconds)),
            )
        }


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
