"""/ and /dashboard: a page, and the files it is made of. They hold no secrets; what they show comes from routes that may ask
for a key."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FOLDER = Path(__file__).parents[1] / "dashboard" / "static"
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def dashboard_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = StaticFiles(directory=FOLDER)

    async def send(path: str, http: Request) -> Response:
        response = await files.get_response(path, http.scope)
        response.headers.update(HEADERS)
        return response

    @router.get("/")
    async def page(http: Request) -> Response:
        return await send("index.html", http)

    @router.get("/dashboard/{path:path}")
    async def file(path: str, http: Request) -> Response:
        return await send(path, http)

    return router
