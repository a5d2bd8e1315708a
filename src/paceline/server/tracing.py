"""Spans of HTTP requests.

OpenTelemetry's ASGI instrumentation always records client addresses, user agents and query strings. Spans here hold the
method, path, route and status only.
"""

from collections.abc import Mapping

from opentelemetry.trace import Span, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.runtime.tracing import Tracing

CLIENT_DISCONNECTED = 499
"""Status of a request whose client disconnected before the response started, as in logs."""


class TracingMiddleware:
    """Makes a span for every sampled POST request. Routes read its context from `state.trace`."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = self._tracing.start_server_span(
            "POST", Headers(scope=scope), {"http.request.method": "POST", "url.path": scope["path"]}
        )
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["trace"] = self._tracing.context(span)
        status = CLIENT_DISCONNECTED

        async def record_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, record_status)
        except Exception as error:
            status = 500
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            _finish(span, scope, status)


def _finish(span: Span, scope: Mapping[str, object], status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:  # a path without a route is not a span name: clients could create any number of names
        span.update_name(f"POST {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
