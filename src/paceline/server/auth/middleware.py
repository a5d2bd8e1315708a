"""The first to see a request: refuses whoever has no key for it, before a byte of the body is read."""

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.server.auth.access import Access
from paceline.server.auth.api_keys import ApiKey
from paceline.server.metrics.metrics import Metrics
from paceline.server.openai.errors import ApiError


class Guard:
    """Routes find who called with `caller_of`."""

    def __init__(self, app: ASGIApp, access: Access, metrics: Metrics) -> None:
        self._app, self._access, self._metrics = app, access, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                key = self._access.admit(path, Headers(scope=scope).get("authorization", ""))
            except ApiError as error:
                self._metrics.rejected("unauthorised" if error.status == 401 else "forbidden")
                await refuse(error, scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = key
        await self._app(scope, receive, send)


def caller_of(http: Request) -> ApiKey:
    caller: ApiKey = http.state.caller
    return caller


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """What was not read stays in the connection, which therefore cannot serve another request."""
    headers = {**error.headers, "connection": "close"}
    await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
