"""The dashboard: its page at /, its files under /dashboard, and its data at /v1/paceline/overview."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from paceline.server.dashboard.overview import Overview, Report

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def dashboard_routes() -> APIRouter:
    """The page and its files. They need no key: the data they show comes from routes that check keys."""
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=STATIC)

    async def send_file(path: str, http: Request) -> Response:
        response = await files.get_response(path, http.scope)
        response.headers.update(HEADERS)
        return response

    @router.get("/")
    async def send_page(http: Request) -> Response:
        return await send_file("index.html", http)

    @router.get("/dashboard/{path:path}")
    async def send_static(path: str, http: Request) -> Response:
        return await send_file(path, http)

    return router


def overview_routes(overview: Overview) -> APIRouter:
    router = APIRouter(tags=["operation"])

    @router.get("/v1/paceline/overview")
    async def read_overview(since: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Report:
        """The state of the server now, and the samples after `since` of the last five minutes."""
        return overview.report(since)

    return router
