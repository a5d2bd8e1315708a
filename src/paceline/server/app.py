"""The HTTP application: routes, their errors, and the document that describes them."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from paceline.server.auth.access import Access
from paceline.server.auth.cross_origin import OriginCheck, parse_origins
from paceline.server.auth.middleware import Guard
from paceline.server.auth.strict import StrictMode
from paceline.server.dashboard.overview import Overview
from paceline.server.gateway.gateway import Gateway
from paceline.server.gateway.service import Service
from paceline.server.openai import error_handlers
from paceline.server.openai.body_check import BodyCheck
from paceline.server.openai.routes.generation import generation_routes
from paceline.server.openai.routes.tokens import token_routes
from paceline.server.openai.schemas.responses import ErrorBody
from paceline.server.routes.admin import admin_routes
from paceline.server.routes.dashboard import dashboard_routes
from paceline.server.routes.health import health_routes
from paceline.server.routes.overview import overview_routes

if TYPE_CHECKING:
    from paceline.runtime.tracing.tracer import Tracing

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "What is wrong, and with which parameter"},
    401: {"model": ErrorBody, "description": "No valid API key"},
    403: {"model": ErrorBody, "description": "The key lacks a scope, or the page is of a foreign origin"},
    404: {"model": ErrorBody, "description": "No such model or page"},
    408: {"model": ErrorBody, "description": "It took too long"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "The queue is full or the key's limit reached: see Retry-After"},
    500: {"model": ErrorBody, "description": "The server failed"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


def create_app(
    gateway: Gateway, access: Access, strict: StrictMode | None = None, tracing: "Tracing | None" = None
) -> FastAPI:
    """Without `strict` there is no strict mode, without `tracing` there are no traces."""
    service, overview = Service(gateway, strict), Overview(gateway)
    app = FastAPI(
        title="Paceline",
        version=version("paceline"),
        redirect_slashes=False,
        responses=ERRORS,
        lifespan=overview.lifespan,
    )
    app.include_router(generation_routes(service))
    app.include_router(token_routes(service))
    app.include_router(health_routes(gateway))
    app.include_router(overview_routes(overview))
    app.include_router(dashboard_routes())
    if access.has_admins:
        app.include_router(admin_routes(gateway, strict))
    error_handlers.install(app)
    app.add_middleware(BodyCheck, limit=gateway.config.max_body_bytes)
    app.add_middleware(Guard, access=access, metrics=gateway.metrics)
    origins = parse_origins(gateway.config.cors_origins)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PATCH"),
            allow_headers=("*",),
            expose_headers=("Retry-After",),
        )
    # The last one added is the first to see a request
    app.add_middleware(OriginCheck, origins=origins, metrics=gateway.metrics)
    if tracing is not None:
        from paceline.server.traced import Traced

        app.add_middleware(Traced, tracing=tracing)
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI's own, less the validation error that is never sent."""
        document = describe()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app
