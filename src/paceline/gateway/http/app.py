"""The HTTP application: routes, middleware, error handlers and the OpenAPI document.

`LoopWatchdog` measures how late the event loop runs its callbacks, and logs where it is stuck.

`TracingMiddleware` makes the spans of HTTP requests. OpenTelemetry's ASGI instrumentation always records client addresses, user
agents and query strings. Spans here hold the method, path, route and status only.
"""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import monotonic
from typing import Any

from fastapi import FastAPI
from opentelemetry.trace import Span, Status, StatusCode
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.core.machine import process_memory
from paceline.core.version import VERSION
from paceline.gateway.admin import (
    LearningMetrics,
    Overview,
    PlannerStatus,
    admin_routes,
    dashboard_routes,
    health_routes,
    learning_routes,
    overview_routes,
    plan_routes,
)
from paceline.gateway.api.responses import ErrorBody
from paceline.gateway.auth import Access, RateLimits
from paceline.gateway.bodies import BodyLimits, BodyProcess, max_values
from paceline.gateway.http.headers import LIMIT_HEADERS, REQUEST_ID, ResponseHeaders
from paceline.gateway.http.middleware import (
    AuthMiddleware,
    BodyMiddleware,
    HostMiddleware,
    OriginMiddleware,
    parse_hosts,
    parse_origins,
)
from paceline.gateway.http.overload import OverloadManager, memory_limit
from paceline.gateway.messages import messages_routes
from paceline.gateway.ollama import ollama_routes
from paceline.gateway.openai import ModelServices, generation_routes, install_error_handlers, model_routes
from paceline.gateway.responses import responses_routes
from paceline.gateway.sessions import Gateway, ServedModels
from paceline.policy.overload import OverloadPolicy
from paceline.telemetry import Tracing

logger = logging.getLogger(__name__)

INTERVAL = 0.05
"""Seconds between two measurements."""
STUCK_SECONDS = 1.0
"""Lag from which the stack of the event loop is logged."""


class LoopWatchdog:
    """A callback of the loop measures its own delay. A thread notices a loop that runs no callback at all."""

    def __init__(self, record: Callable[[float], None]) -> None:
        """`record` receives every measured lag in seconds, on the event loop."""
        self._record = record
        self._due = 0.0
        """Time of the next measurement."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measures inside the block."""
        stop, self._due = threading.Event(), monotonic() + INTERVAL
        loop_thread = threading.get_ident()
        thread = threading.Thread(target=self._watch, args=(stop, loop_thread), name="paceline-watchdog", daemon=True)
        thread.start()
        task = asyncio.create_task(self._measure())
        try:
            yield
        finally:
            task.cancel()
            stop.set()

    async def _measure(self) -> None:
        while True:
            self._due = monotonic() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self._record(max(0.0, monotonic() - self._due))

    def _watch(self, stop: threading.Event, loop_thread: int) -> None:
        is_reported, last = False, monotonic()
        while not stop.wait(STUCK_SECONDS / 2):
            now = monotonic()
            was_suspended, last = now - last > STUCK_SECONDS, now
            lag = now - self._due  # read once: the loop may go on meanwhile
            is_stuck = lag > STUCK_SECONDS and not was_suspended
            if is_stuck and not is_reported:
                frame = sys._current_frames().get(loop_thread)
                stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
                logger.error("the event loop is stuck for %.1f s at:\n%s", lag, stack)
            is_reported = is_stuck


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Invalid request; `param` names the parameter"},
    401: {"model": ErrorBody, "description": "No valid API key"},
    403: {"model": ErrorBody, "description": "The key lacks a scope, or the page has a foreign origin"},
    404: {"model": ErrorBody, "description": "Unknown model or route"},
    408: {"model": ErrorBody, "description": "The request passed its time limit"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    415: {"model": ErrorBody, "description": "The body is compressed"},
    429: {"model": ErrorBody, "description": "The queue is full, or the key reached a limit: see Retry-After"},
    500: {"model": ErrorBody, "description": "Internal error"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


class Application(FastAPI):
    """FastAPI with the headers of every response, and without its own validation error in the OpenAPI document: this server
    sends `ErrorBody` instead."""

    def __init__(self, limits: RateLimits, **options: Any) -> None:
        self._limits = limits
        super().__init__(**options)

    def build_middleware_stack(self) -> ASGIApp:
        """The headers are added outside of all middleware, so that the response to a bug has them too."""
        return ResponseHeaders(super().build_middleware_stack(), self._limits)

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def create_app(models: ServedModels, access: Access, tracing: "Tracing | None" = None) -> FastAPI:
    """The application of a server. Without `tracing` it makes no spans."""
    names = [gateway.model for gateway in models]
    overviews = {gateway.model: Overview(gateway, names, access.has_admin_routes) for gateway in models}
    most_values = max_values(max(gateway.target.max_model_len for gateway in models))
    limits = BodyLimits(most_values, {gateway.model: gateway.max_chars for gateway in models})
    large = BodyProcess(limits, models.first.charge_cpu)
    overload = _overload_manager(models, overviews, large)
    app = Application(
        models.first.limits,
        title="Paceline",
        version=VERSION,
        redirect_slashes=False,
        responses=ERRORS,
        lifespan=_lifespan(models, overviews, large, overload),
        docs_url=None,  # FastAPI's pages load their scripts from another site
        redoc_url=None,
    )
    app.state.large_bodies = large
    _register_learning_metrics(models)
    _include_routes(app, models, overviews)
    if access.has_admin_routes:
        _include_admin_routes(app, models)
    install_error_handlers(app)
    _add_middleware(app, models.first, access, most_values, large, overload)
    if tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=tracing)
    return app


def _overload_manager(models: ServedModels, overviews: Mapping[str, Overview], large: BodyProcess) -> OverloadManager:
    """The manager of the memory of this process and of the one that checks large bodies."""

    def read() -> int:
        return process_memory() + (0 if large.pid is None else process_memory(large.pid))

    def tell(text: str, is_bad: bool) -> None:
        for overview in overviews.values():
            overview.add_event(text, is_bad)

    policy = OverloadPolicy(memory_limit(models.first.config.gateway_memory_bytes))
    return OverloadManager(policy, list(models), models.first.metrics, read, tell)


def _lifespan(
    models: ServedModels, overviews: Mapping[str, Overview], large: BodyProcess, overload: OverloadManager
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Starts and stops what runs during the application's life: the watchdog of its event loop, the manager of its memory, the
    overviews, and the process for large bodies."""
    watchdog = LoopWatchdog(models.first.metrics.loop_lag.observe)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with watchdog.running(), overload.running(), AsyncExitStack() as stack:
            for overview in overviews.values():
                await stack.enter_async_context(overview.running())
            stack.callback(large.close)
            yield

    return lifespan


def _register_learning_metrics(models: ServedModels) -> None:
    for gateway in models:
        if gateway.samples is not None:
            gateway.metrics.registry.register(LearningMetrics(gateway.model, gateway.samples))


def _include_routes(app: FastAPI, models: ServedModels, overviews: Mapping[str, Overview]) -> None:
    services = ModelServices(models)
    app.include_router(generation_routes(services))
    app.include_router(model_routes(services))
    app.include_router(responses_routes(services))
    app.include_router(messages_routes(services))
    app.include_router(ollama_routes(services))
    app.include_router(health_routes(models))
    app.include_router(overview_routes(models, overviews))
    app.include_router(dashboard_routes())


def _include_admin_routes(app: FastAPI, models: ServedModels) -> None:
    app.include_router(admin_routes(models))
    app.include_router(learning_routes(models))
    board = PlannerStatus()
    models.first.metrics.registry.register(board)
    app.include_router(plan_routes(board))


def _add_middleware(
    app: FastAPI, gateway: Gateway, access: Access, most_values: int, large: BodyProcess, overload: OverloadManager
) -> None:
    """Adds the checks of every request. The middleware that is added last runs first."""
    config, metrics = gateway.config, gateway.metrics
    app.add_middleware(
        BodyMiddleware,
        gateway=gateway,
        limit=config.max_body_bytes,
        most_values=most_values,
        large=large,
        overload=overload,
        has_keys=access.has_keys,
    )
    app.add_middleware(AuthMiddleware, access=access, metrics=metrics)
    origins = parse_origins(config.cors_origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PATCH", "DELETE"),
            allow_headers=("*",),
            expose_headers=("Retry-After", REQUEST_ID, *LIMIT_HEADERS),
        )
    app.add_middleware(OriginMiddleware, origins=origins, metrics=metrics)
    hosts = parse_hosts(config.allowed_hosts)
    app.add_middleware(HostMiddleware, hosts=hosts, has_keys=access.has_keys, metrics=metrics)


CLIENT_DISCONNECTED = 499
"""Status of a request whose client disconnected before the response started, as in logs."""


class TracingMiddleware:
    """Makes a span for every sampled POST request. Routes read its context from `state.trace` and set `state.request_id`."""

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


def _finish(span: Span, scope: Scope, status: int) -> None:
    route = getattr(scope.get("route"), "path", None)
    if route is not None:  # a path without a route is not a span name: clients could create any number of names
        span.update_name(f"POST {route}")
        span.set_attribute("http.route", route)
    request_id = scope["state"].get("request_id")
    if request_id is not None:
        span.set_attribute("paceline.request_id", request_id)
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    span.end()
