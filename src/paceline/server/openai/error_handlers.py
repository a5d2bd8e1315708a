"""Whatever goes wrong in a route, the answer is OpenAI's error object."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline.core.errors import PacelineError
from paceline.server.openai.errors import ApiError, BadRequest, MethodNotAllowed, NotFound, as_api_error
from paceline.server.openai.validation import bad_request

logger = logging.getLogger(__name__)


def install(app: FastAPI) -> None:
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(PacelineError, _ours)
    app.add_exception_handler(Exception, _bug)


def response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, error.headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = error.body
    if isinstance(body, bytes):
        problem = BadRequest("the body must be JSON, with content-type application/json", code="invalid_json")
    else:
        field = getattr(request.scope.get("route"), "body_field", None)
        schema = getattr(getattr(field, "field_info", None), "annotation", None)
        problem = bad_request(error.errors(), body, schema)
    return response(problem)


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return response(NotFound(f"there is nothing at {request.url.path}", code="not_found"))
    if error.status_code == 405:
        message = f"{request.method} is not allowed at {request.url.path}"
        return response(MethodNotAllowed(message, code="method_not_allowed", headers=headers))
    problem = BadRequest(str(error.detail), headers=headers)
    problem.status = error.status_code
    return response(problem)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    problem = as_api_error(error)
    if problem is not error and problem.status >= 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response(problem)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    """It is raised again afterwards, and logged by whoever runs the application."""
    return response(as_api_error(error))
