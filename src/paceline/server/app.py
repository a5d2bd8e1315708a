"""The HTTP application: routes, middleware, error handlers and the OpenAPI document."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.core.version import VERSION
from paceline.server.auth.access import Access
from paceline.server.auth.hosts import HostMiddleware, parse_hosts
from paceline.server.auth.middleware import AuthMiddleware, BodyMiddleware, OriginMiddleware, parse_origins
from paceline.server.dashboard.overview import Overview
from paceline.server.gateway.body_process import BodyProcess
from paceline.server.gateway.body_shape import max_values
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.loop_watchdog import LoopWatchdog
from paceline.server.gateway.models import ServedModels
from paceline.server.learning.routes import LearningMetrics, learning_routes
from paceline.server.openai.body_check import BodyLimits
from paceline.server.openai.error_handlers import install_error_handlers
from paceline.server.openai.routes import generation_routes, model_routes
from paceline.server.openai.schemas.responses import ErrorBody
from paceline.server.plan_board import PlannerStatus, plan_routes
from paceline.server.routes import admin_routes, dashboard_routes, health_routes, overview_routes

if TYPE_CHECKING:
    from paceline.runtime.tracing import Tracing

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Invalid request; `param` names the parameter"},
    401: {"model": ErrorBody, "description": "No valid API key"},
    403: {"model": ErrorBody, "description": "The key lacks a scope, or the page has a foreign origin"},
    404: {"model": ErrorBody, "description": "Unknown model or route"},
    408: {"model": ErrorBody, "description": "The request passed its time limit"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "The queue is full, or the key reached a limit: see Retry-After"},
    500: {"model": ErrorBody, "description": "Internal error"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


class Application(FastAPI):
    """FastAPI without its own validation error in the OpenAPI document: this server sends `ErrorBody` instead."""

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
    large = BodyProcess(BodyLimits(most_values, {gateway.model: gateway.max_chars for gateway in models}))
    app = Application(
        title="Paceline",
        version=VERSION,
        redirect_slashes=False,
        responses=ERRORS,
        lifespan=_lifespan(models, overviews, large),
        docs_url=None,  # FastAPI's pages load their scripts from another site
        redoc_url=None,
    )
    app.state.large_bodies = large
    _register_learning_metrics(models)
    _include_routes(app, models, overviews)
    if access.has_admin_routes:
        _include_admin_routes(app, models)
    install_error_handlers(app)
    _add_middleware(app, models.first, access, most_values, large)
    if tracing is not None:
        from paceline.server.tracing import TracingMiddleware

        app.add_middleware(TracingMiddleware, tracing=tracing)
    return app


def _lifespan(
    models: ServedModels, overviews: Mapping[str, Overview], large: BodyProcess
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Starts and stops what runs during the application's life: the watchdog of its event loop, the overviews, and the process
    for large bodies."""
    watchdog = LoopWatchdog(models.first.metrics.loop_lag.observe)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with watchdog.running(), AsyncExitStack() as stack:
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
    app.include_router(generation_routes(models))
    app.include_router(model_routes(models))
    app.include_router(health_routes(models))
    app.include_router(overview_routes(models, overviews))
    app.include_router(dashboard_routes())


def _include_admin_routes(app: FastAPI, models: ServedModels) -> None:
    app.include_router(admin_routes(models))
    app.include_router(learning_routes(models))
    board = PlannerStatus()
    models.first.metrics.registry.register(board)
    app.include_router(plan_routes(board))


def _add_middleware(app: FastAPI, gateway: Gateway, access: Access, most_values: int, large: BodyProcess) -> None:
    """Adds the checks of every request. The middleware that is added last runs first."""
    config, metrics = gateway.config, gateway.metrics
    app.add_middleware(
        BodyMiddleware,
        limit=config.max_body_bytes,
        limits=gateway.limits,
        most_values=most_values,
        metrics=metrics,
        large=large,
    )
    app.add_middleware(AuthMiddleware, access=access, metrics=metrics)
    origins = parse_origins(config.cors_origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PATCH"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    app.add_middleware(OriginMiddleware, origins=origins, metrics=metrics)
    hosts = parse_hosts(config.allowed_hosts)
    app.add_middleware(HostMiddleware, hosts=hosts, has_keys=access.has_keys, metrics=metrics)
