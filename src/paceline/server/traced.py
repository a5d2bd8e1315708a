"""The span of an HTTP request, around everything else that is done for it."""

from collections.abc import Mapping

from opentelemetry.trace import Span, Status, StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.runtime.tracing.tracer import Tracing

GONE = 499
"""Of a caller who left before there was a status; as in logs."""


class Traced:
    """Calls that do something (POST) have a span; pages and figures have none. Routes find its context in `state.trace`."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = self._tracing.serve(
            "POST", Headers(scope=scope), {"http.request.method": "POST", "url.path": scope["path"]}
        )
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})["trace"] = self._tracing.context(span)
        status = GONE

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            status = 500
            span.set_attribute("error.type", type(error).__name__)
            raise
        finally:
            _finish(span, scope, status)


def _finish(span: Span, scope: Mapping[str, object], status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:  # what nobody serves has no name: anyone could make up as many as they like
        span.update_name(f"POST {route}")
        span.set_attribute("http.route", route)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
