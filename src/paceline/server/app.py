"""The HTTP application: routes, their errors, and the document that describes them."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from paceline.server import error_handlers
from paceline.server.body_check import BodyCheck
from paceline.server.gateway import Gateway
from paceline.server.overview import Overview
from paceline.server.routes.admin import admin_routes
from paceline.server.routes.dashboard import dashboard_routes
from paceline.server.routes.generation import generation_routes
from paceline.server.routes.health import health_routes
from paceline.server.routes.overview import overview_routes
from paceline.server.routes.tokens import token_routes
from paceline.server.schemas.responses import ErrorBody
from paceline.server.service import Service

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "What is wrong, and with which parameter"},
    404: {"model": ErrorBody, "description": "No such model or page"},
    408: {"model": ErrorBody, "description": "It took too long"},
    413: {"model": ErrorBody, "description": "The body is too large"},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to try again"},
    500: {"model": ErrorBody, "description": "The server failed"},
    503: {"model": ErrorBody, "description": "The server is shutting down"},
}


def create_app(gateway: Gateway) -> FastAPI:
    service, overview = Service(gateway), Overview(gateway)
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
    if gateway.config.admin_key is not None:
        app.include_router(admin_routes(gateway, gateway.config.admin_key), responses={401: {"model": ErrorBody}})
    error_handlers.install(app)
    app.add_middleware(BodyCheck, limit=gateway.config.max_body_bytes)
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
