"""Exception handlers: every error of a route becomes the error object of its API."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from paceline.core.errors import PacelineError
from paceline.gateway.api.errors import (
    ApiError,
    BadRequest,
    MethodNotAllowed,
    NotFound,
    error_answer,
    log_refusal,
    to_api_error,
)
from paceline.gateway.bodies import body_error

logger = logging.getLogger(__name__)


def install_error_handlers(app: FastAPI) -> None:
    """Makes every error of a route the error object of its API."""
    app.add_exception_handler(RequestValidationError, _handle_invalid_body)
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(PacelineError, _handle_paceline_error)
    app.add_exception_handler(Exception, _handle_bug)


def _answer(request: Request, error: ApiError) -> JSONResponse:
    """The response. The log has the reason of a 4xx."""
    log_refusal(error, request.url.path)
    status, body = error_answer(error, request.url.path)
    return JSONResponse(body, status, error.headers)


async def _handle_invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = error.body
    if isinstance(body, bytes):
        api_error = BadRequest("the body must be JSON with content-type application/json", code="invalid_json")
    else:
        field = getattr(request.scope.get("route"), "body_field", None)
        schema = getattr(getattr(field, "field_info", None), "annotation", None)
        api_error = body_error(error.errors(), body, schema)
    return _answer(request, api_error)


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        path = request.url.path
        return _answer(request, NotFound(f"no route {path}{_route_hint(request, path)}", code="not_found"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path}"
        return _answer(request, MethodNotAllowed(message, code="method_not_allowed", headers=headers))
    api_error = BadRequest(str(error.detail), headers=headers)
    api_error.status = error.status_code
    return _answer(request, api_error)


def _route_hint(request: Request, path: str) -> str:
    """What a client may have meant: clients differ in whether their base URL ends with /v1."""
    if path.startswith("/admin/"):
        return "; a server without `admin_key` and `api_keys` has no admin routes"
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        scope = {**request.scope, "path": other}
        if other != path and any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes):
            return f"; did you mean {other}? Check the base URL of the client"
    return ""


async def _handle_paceline_error(request: Request, error: Exception) -> JSONResponse:
    api_error = to_api_error(error)
    if api_error is not error and api_error.status >= 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(request, api_error)


async def _handle_bug(request: Request, error: Exception) -> JSONResponse:
    """Starlette raises the error again after this response, and uvicorn logs it."""
    return _answer(request, to_api_error(error))
